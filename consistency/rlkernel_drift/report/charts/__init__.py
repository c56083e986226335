"""Charts as inline SVG: colours by class, one sentence in words each, marks that a pointer or arrow keys can read."""
