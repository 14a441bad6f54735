"""Import and export of other projects' trees."""
