"""Calibration: prompts in, a RankTrace out; and the profiler that measures step costs."""
