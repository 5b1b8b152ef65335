"""torchrun in the background: its workers, and its lines as they come."""

import os
import pathlib
import queue
import subprocess
import sys
import threading
import time

from tests.launch import ROOT


class Torchrun:
    """torchrun with the arguments `args`. `prefix`: a command that starts it; `env`: more environment variables."""

    def __init__(self, *args, prefix=(), **env):
        command = [*prefix, sys.executable, "-m", "torch.distributed.run", *args]
        pipe = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, **env}, **pipe)
        self._lines, self._seen = queue.Queue(), []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self):
        for line in self.process.stdout:
            self._seen.append(line)
            self._lines.put(line)
        self._lines.put(None)

    @property
    def output(self):
        """All lines so far."""
        return "".join(self._seen)

    def wait_for(self, start, seconds):
        """The next line that begins with `start`."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                line = self._lines.get(timeout=max(0, deadline - time.monotonic()))
            except queue.Empty:
                raise AssertionError(f"no line {start!r} within {seconds} s:\n{self.output[-5000:]}") from None
            assert line is not None, f"torchrun ended:\n{self.output[-5000:]}"
            if line.startswith(start):
                return line

    def wait_for_a_step(self, seconds):
        """Wait until a start of a run has done a step."""
        self.wait_for("tokens per iteration", seconds)  # said once by each start
        self.wait_for("iter ", seconds)

    def workers(self):
        """The process ids of the workers."""
        pid = self.process.pid
        return {*map(int, pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split())}

    def wait_for_workers(self, number, dead, seconds):
        """The process ids of `number` workers, none of them among the `dead`. Skips what the dead had said."""
        deadline = time.monotonic() + seconds
        while True:
            if len(workers := self.workers() - dead) == number:
                while not self._lines.empty():
                    self._lines.get()
                return workers
            assert time.monotonic() < deadline, f"no {number} new workers within {seconds} s:\n{self.output[-5000:]}"
            time.sleep(0.01)

    def ended(self, seconds):
        """The exit status, once torchrun has ended."""
        status = self.process.wait(timeout=seconds)
        self._reader.join(timeout=5)
        return status

    def stop(self):
        """End torchrun and its workers, if they are still there."""
        self.process.terminate()  # a kill would leave the workers behind
        self.process.wait(timeout=60)
