"""torch's profiler in a process of its own, where all that it would write to stderr is seen."""

import subprocess
import sys


def test_the_profiler_writes_nothing_to_stderr(tmp_path):
    script = (
        "import sys; from pathlib import Path; from minidsa.scheduler import profiling as p\n"
        "from minidsa.scheduler.messages import StartProfile, StopProfile\n"
        "p.silence_profiler(); assert 'torch' not in sys.modules\n"
        "profiler = p.Profiler(Path(sys.argv[1]))\n"
        "assert profiler.answer(StartProfile()).done and profiler.answer(StopProfile()).done"
    )
    run = [sys.executable, "-c", script, str(tmp_path)]
    done = subprocess.run(run, capture_output=True, text=True, check=True)
    assert done.stderr == "" and list(tmp_path.iterdir())
