"""What starts, watches and judges the ranks of a run from outside."""
