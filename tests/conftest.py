"""Small tensors are fastest on one thread, and stay so on a busy machine."""

import torch
from tqdm import tqdm

torch.set_num_threads(1)
tqdm.monitor_interval = 0  # a thread of its own, whose lock a forked process could inherit
