"""A small serving loop: requests join, decode, finish and reuse rows and pages, through one compiled graph a step."""
