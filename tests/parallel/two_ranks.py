"""A program of two ranks that do nothing: wait to be told to end, or fail as they are told to."""

import logging
import sys

import torch

from slipstream.models.topology import Topology
from slipstream.ranks.launch import Seat, leave, take_seat


def follow(reason: str, seat: Seat) -> None:
    """Wait for the first rank to end; with a reason, fail instead."""
    if reason:
        raise MemoryError(reason)
    while seat.channel.receive() is not None:
        pass


if __name__ == "__main__":
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.INFO)
    seat = take_seat(Topology(2), torch.device("cpu"), follow, sys.argv[1])
    if sys.argv[1]:
        seat.channel.collect()  # nothing will come but the news that the other rank failed
    sys.stdout.write("up\n")
    sys.stdout.flush()
    sys.stdin.read()
    leave(seat)
