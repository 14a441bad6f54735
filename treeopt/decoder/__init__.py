"""Plain decoding, tree decoding, and their comparison."""
