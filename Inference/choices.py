"""The words that options take and their defaults, for programs that explain them before torch is imported."""
STEPS = 100  # of refinement: beyond about 50 the Dice of the hippocampus pairs gains 0.002
AFFINES = ("rigid", "affine")
STARTS = ("auto", "header", "centre")
SIMILARITIES = ("correlation", "mapped", "mind")
LABELS = ("smooth", "nearest")  # ways to carry label maps
ALSO = ("h5", "mat", "nrrd", "mha", "mgz")  # what is written for other programs on request
