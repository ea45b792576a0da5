"""What all tests share."""

import torch

torch.set_num_threads(1)  # tiny models gain nothing from a second thread, and stall on a busy one
