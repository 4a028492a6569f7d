"""Ranks that share no file system: found out, saved in parts, published in each store, loaded from all of them."""
