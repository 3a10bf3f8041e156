"""Weights through a torch.distributed backend: device collectives where there are accelerators, gloo on CPUs.

``publish`` snapshots every rank's own regions into flat memory on the device and returns; a thread of every rank then
serves the receivers that ask for the version, while training goes on. A region goes straight from the rank that holds it
to those that need it. There are two snapshots, so that version v+1 is made while receivers still take v.

Memory: every rank keeps two snapshots of its share of the policy, and where tensors lie in parts on several ranks, room to
gather the few that it hashes. A receiver keeps what it wants once.

Receivers find the sender through a TCP store that sender rank 0 serves, come and go as they like, and may want whole
tensors or regions of them. Engines that have a broadcast endpoint of their own can take the versions through it.
"""

from weight_sync.ici.receiver import IciReceiver
from weight_sync.ici.sender import IciSender
from weight_sync.transport import Transport

__all__ = ["TRANSPORT", "IciReceiver", "IciSender"]

TRANSPORT = Transport(IciSender, IciReceiver)
