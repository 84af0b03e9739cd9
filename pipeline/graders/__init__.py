"""Graders: who judges a group. One adapter a kind; `base` says what each is."""
