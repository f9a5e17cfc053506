"""`python -m nemotriton.engine.follower`: a process that rank 0 starts, for one other rank.

It reads what to run from its stdin and repeats rank 0's steps until it is let go.
"""

import pickle
import signal
import sys


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches rank 0 too, which ends all
    from nemotriton.engine.llm import LLM

    work = pickle.load(sys.stdin.buffer)
    LLM.follow(work)


if __name__ == "__main__":
    main()
