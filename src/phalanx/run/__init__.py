"""Running a Program: the weights that a rank holds, the loop over its actions, the optimizer, and what the user calls."""
