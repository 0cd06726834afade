"""The words that options take and their defaults, for programs that explain them before torch is imported."""
STEPS = 100  # of refinement: at each of three resolutions the similarity hardly grows after 25 of them
AFFINES = ("rigid", "affine")
STARTS = ("auto", "header", "centre")
SIMILARITIES = ("correlation", "mapped", "mind")
LABELS = ("smooth", "nearest")  # ways to carry label maps
ALSO = ("h5", "mat", "nrrd", "mha", "mgz")  # what is written for other programs on request
