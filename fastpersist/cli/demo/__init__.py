"""`fastpersist demo`: trains a small GPT, kills it, and resumes it bit for bit."""
