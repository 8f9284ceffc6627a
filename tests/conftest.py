"""Small tensors are fastest on one thread, and stay so on a busy machine."""

import torch

torch.set_num_threads(1)
