"""`python -m bench.ceilings`: what this GPU can do at most, measured here, as one JSON object."""

import contextlib
import json

from bench import rows
from bench.cli import application, need_gpu, run
from nemotriton.autotune.child import ChildRunner
from nemotriton.autotune.trial import cuda_runner

app = application(__doc__)


@app.command()
def main() -> None:
    """Copy and read bandwidth, and the rates of bf16 and fp32 matrix products."""
    need_gpu()
    with contextlib.closing(ChildRunner(cuda_runner)) as runner:
        print(json.dumps(rows.environment(runner.facts())))


if __name__ == "__main__":
    run(app)
