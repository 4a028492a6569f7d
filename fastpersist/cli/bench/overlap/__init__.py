"""`fastpersist bench overlap`: what saves cost a training, step by step."""
