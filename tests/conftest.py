"""Puts the repository root on sys.path so that the tests run from any folder."""
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
torch.set_num_threads(2)
