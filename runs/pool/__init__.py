"""``specgym pool``: list, show, fetch or build pools."""
