"""A consumer on a GPU: ``python direct_taker.py RAY_ADDRESS CHANNEL DEVICE COUNT`` prints what it got."""

import sys

import ray
import torch

from rlinf_plugins.scheduler.channel import Channel

address, name, device, count = sys.argv[1:]
ray.init(address=address, log_to_driver=False)
torch.cuda.set_device(device)
consumer = Channel.connect(name).consumer()
for _ in range(int(count)):
    with consumer.get(timeout=100) as delivery:
        number, tensor = delivery.value
        print(number, tensor.unique().tolist(), tensor.device)
