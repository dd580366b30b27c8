"""Configurations: compose them, refuse what is not to be trusted or cannot be right, and make objects of them."""
