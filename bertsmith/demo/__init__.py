"""The demo: the whole path, from text to a classifier, in minutes."""
