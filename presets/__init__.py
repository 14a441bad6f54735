"""Presets that come with treeopt, and the small heads that one of them uses."""
