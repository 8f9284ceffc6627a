"""Chaos for a limited time: kills, full disks, damaged files, interrupts and threads, held against undisturbed results.

    python tests/soak.py --minutes 15

The counts are added to those of earlier runs in results/soak.json, with what went wrong, if anything did.
"""

import argparse
import json
import os
import random
import resource
import shutil
import signal
import socket
import sys
import tempfile
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch
from sensitive import data as few_data
from sensitive import fitted, same, sensitive, state
from torch import distributed, nn
from tqdm import tqdm

import sublaplace.curvature.stream
import sublaplace.runtime.checkpoint
from sublaplace import SavedFileError, SubspaceLaplace
from sublaplace.runtime import files

RESULTS = Path(__file__).parents[1] / "results" / "soak.json"
CPU = torch.device("cpu")
PATIENCE = 60.0  # seconds after which a process counts as hanging
GROUP_TIMEOUT = timedelta(seconds=5)  # of torch, while a group is not complete


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))


def batches():
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(96, 5, generator=generator)
    return list(zip(inputs.split(8), (torch.arange(96) % 3).split(8), strict=True))


class Soak:
    """The counts of one run, and the ways to disturb."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.random = folder, random.Random(seed)
        self.counts: dict[str, int] = {}
        self.wrong: list[str] = []
        self._fit_and_save(folder / "quiet", folder / "expected")
        start = time.monotonic()  # of a second fit, as warm as those of forked processes
        self._fit_and_save(folder / "quiet", folder / "expected")
        self.seconds_of_a_fit = time.monotonic() - start
        self.expected = (folder / "expected").read_bytes()
        self.expected_content = content(folder / "expected")
        self.model, self.inputs = sensitive(), few_data()[0]
        self.model.train()
        self.posteriors = [fitted(self.model), SubspaceLaplace(self.model, "classification", dim=3).fit(self._few())]
        self.predictions = [la(self.inputs) for la in self.posteriors]
        self.variances = [la.functional_variance(self.inputs) for la in self.posteriors]

    def _few(self):
        x, y = few_data()
        return [(x, y)]

    def count(self, what: str, number: int = 1) -> None:
        self.counts[what] = self.counts.get(what, 0) + number

    def check(self, right: bool, what: str) -> None:
        if not right:
            self.wrong.append(what)
            print("WRONG:", what, flush=True)

    # Processes --------------------------------------------------------------------------------------------------------

    def _fit_and_save(self, checkpoint, path, limit=None) -> None:
        if limit is not None:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        model = network()
        model.train()
        before = state(model)
        la = SubspaceLaplace.paper(model, "classification", dim=6).fit(batches(), checkpoint=checkpoint)
        if not same(before, state(model)):
            os._exit(3)
        if limit is not None:
            x = batches()[0][0]
            if not torch.equal(la(x), SubspaceLaplace.load(self.folder / "expected", model)(x)):
                os._exit(4)
        la.save(path)

    def _forked(self, work, *arguments) -> int:
        child = os.fork()
        if child:
            return child
        code = 9
        try:
            signal.setitimer(signal.ITIMER_REAL, 0)
            warnings.simplefilter("ignore")
            work(*arguments)
            code = 0
        except SavedFileError as error:
            code = 2
            if arguments and "cannot be written" not in str(error):
                print(error, flush=True)
        except RuntimeError as error:
            code = 5 if "cannot go on" in str(error) else 6
        finally:
            os._exit(code)

    def _waited(self, child: int, seconds: float = PATIENCE) -> int | None:
        """The exit code of a child, negative for a signal; None if it hangs, in which case it is killed."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            found, status = os.waitpid(child, os.WNOHANG)
            if found:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.001)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return None

    def killed_fit(self) -> None:
        """Kill a fit at random points until it is through, and compare its file with the undisturbed one."""
        checkpoint, path = self.folder / "kept", self.folder / "found"
        path.unlink(missing_ok=True)
        for attempt in range(12):
            child = self._forked(self._fit_and_save, checkpoint, path)
            if attempt < 11:
                time.sleep(self.random.uniform(0, 1.1 * self.seconds_of_a_fit))
                os.kill(child, signal.SIGKILL)
            code = self._waited(child)
            if code == -signal.SIGKILL:
                self.count("fits killed")
                if path.exists():
                    self.check(content(path) == self.expected_content, "a file of a killed process is damaged")
                continue
            self.check(code == 0, f"a fit that went on after kills ended with {code}")
            break
        self.check(content(path) == self.expected_content, "a fit that went on after kills has another result")
        self.count("fits completed after kills, bit for bit")

    def killed_rank(self) -> None:
        """Kill one of two ranks at any time; the other one ends with a message, or was done before.

        Until the group is complete, torch itself waits for all ranks, as long as the group's timeout says and in some
        cases twice as long. From then on, the other rank ends at once, with our error.
        """
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]

        complete = [self.folder / f"complete {rank}" for rank in range(2)]
        for path in complete:
            path.unlink(missing_ok=True)

        def work(rank):
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            distributed.init_process_group("gloo", rank=rank, world_size=2, timeout=GROUP_TIMEOUT)
            distributed.barrier()
            complete[rank].touch()
            model = network()
            before = state(model)
            try:
                SubspaceLaplace.paper(model, "classification", dim=6).fit(batches())
            finally:
                if not same(before, state(model)):
                    os._exit(3)

        children = [self._forked(work, rank) for rank in range(2)]
        victim = self.random.randrange(2)
        time.sleep(self.random.uniform(0, 3 * self.seconds_of_a_fit))
        with suppress(ProcessLookupError):
            os.kill(children[victim], signal.SIGKILL)
        code, other = self._waited(children[victim]), self._waited(children[1 - victim])
        if code == -signal.SIGKILL:
            joined = complete[1 - victim].exists()
            self.count("ranks killed" if joined else "ranks killed before their group was complete")
            self.check(other in ((0, 5) if joined else (6,)), f"the rank beside a killed one ended with {other}")

    def full_disk(self) -> None:
        """Let files grow to a random size only: the fit is right, and the old file stays."""
        path = self.folder / "kept file"
        path.write_bytes(self.expected)
        limit = self.random.randrange(200, len(self.expected))
        code = self._waited(self._forked(self._fit_and_save, self.folder / "cramped", path, limit))
        self.check(code == 2, f"without room, a fit and its save ended with {code}")
        self.check(path.read_bytes() == self.expected, "without room, the old file was damaged")
        shutil.rmtree(self.folder / "cramped", ignore_errors=True)
        self.count("fits and saves without room on the disk")

    # Files ------------------------------------------------------------------------------------------------------------

    def damaged_files(self, number: int = 100) -> None:
        path, model = self.folder / "damaged", network()
        for _ in range(number):
            content_of = bytearray(self.expected)
            self._damage(content_of)
            path.write_bytes(content_of)
            try:
                SubspaceLaplace.load(path, model)
                self.check(bytes(content_of) == self.expected, "a damaged file was loaded")
            except SavedFileError:
                self.count("damaged files refused")
            except Exception as error:
                self.check(False, f"a damaged file gave {type(error).__name__}: {error}")

    def damaged_checkpoint(self) -> None:
        """Kill a fit, damage a file of its checkpoint: the fit goes on rightly, or is refused with our error."""
        checkpoint, path = self.folder / "spoilt", self.folder / "spoilt result"
        child = self._forked(self._fit_and_save, checkpoint, path)
        time.sleep(self.random.uniform(0.3, 0.9) * self.seconds_of_a_fit)
        os.kill(child, signal.SIGKILL)
        self._waited(child)
        victims = sorted(checkpoint.glob("*")) if checkpoint.exists() else []
        if victims:
            victim = self.random.choice(victims)
            spoilt = bytearray(victim.read_bytes() or b"x")
            self._damage(spoilt)
            victim.write_bytes(spoilt)
            code = self._waited(self._forked(self._fit_and_save, checkpoint, path))
            self.check(code in (0, 2), f"a damaged checkpoint ended with {code}")
            if code == 0:
                self.check(content(path) == self.expected_content, "a damaged checkpoint gave another result")
            self.count("damaged checkpoints")
        shutil.rmtree(checkpoint, ignore_errors=True)
        path.unlink(missing_ok=True)

    def _damage(self, content_of: bytearray) -> None:
        place = self.random.randrange(len(content_of))
        match self.random.randrange(5):
            case 0:
                content_of[place] ^= 1 << self.random.randrange(8)
            case 1:
                del content_of[place:]
            case 2:
                content_of[place : place + 64] = bytes(min(64, len(content_of) - place))
            case 3:
                content_of += self.random.randbytes(1 + place % 100)
            case 4:
                content_of[place : place + 8] = self.random.randbytes(min(8, len(content_of) - place))

    # Predictions ------------------------------------------------------------------------------------------------------

    def interrupted_predictions(self, number: int = 100) -> None:
        """Interrupt predictions anywhere by a signal; the model is as before, and the next prediction is right."""
        before, la = state(self.model), self.posteriors[0]

        def interrupt(*_):
            raise KeyboardInterrupt

        signal.signal(signal.SIGALRM, interrupt)
        for _ in range(number):
            caught = False
            try:
                signal.setitimer(signal.ITIMER_REAL, self.random.uniform(1e-4, self.seconds_of_a_prediction()))
                la(self.inputs)
                signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                caught = True
            except RuntimeError as error:
                caught = True
                self.check("mode stack" in str(error), f"an interrupted prediction raised {error}")  # within torch
            signal.setitimer(signal.ITIMER_REAL, 0)
            self.check(same(before, state(self.model)), "an interrupted prediction left the model changed")
            if caught:
                self.count("predictions interrupted")
        self.check(torch.equal(la(self.inputs), self.predictions[0]), "a prediction after interrupts is wrong")

    def seconds_of_a_prediction(self) -> float:
        if not hasattr(self, "_seconds"):
            start = time.monotonic()
            for _ in range(5):
                self.posteriors[0](self.inputs)
            self._seconds = (time.monotonic() - start) / 5
        return self._seconds

    def concurrent_predictions(self, threads: int = 4, each: int = 75) -> None:
        """Predict with two posteriors of one model in several threads."""
        before = state(self.model)

        def run(number):
            k, right = number % 2, 0
            for step in range(each):
                if step % 5 == 4:
                    right += torch.equal(self.posteriors[k].functional_variance(self.inputs), self.variances[k])
                else:
                    right += torch.equal(self.posteriors[k](self.inputs), self.predictions[k])
            return right

        with ThreadPoolExecutor(threads) as pool:
            right = sum(pool.map(run, range(threads)))
        self.check(right == threads * each, f"{threads * each - right} concurrent predictions are wrong")
        self.check(same(before, state(self.model)), "concurrent predictions left the model changed")
        self.count("concurrent predictions", threads * each)


def content(path: Path):
    tensors, description = files.read(path, CPU)
    return {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}, description


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--seed", type=int, default=None)
    options = parser.parse_args()
    torch.set_num_threads(1)
    tqdm.monitor_interval = 0  # a thread of its own, whose lock a forked process could inherit
    warnings.simplefilter("ignore")
    # Everything is put aside at once, so that short fits are killed between writes as well as within them.
    sublaplace.runtime.checkpoint.SECONDS_BETWEEN_WRITES = 0.0
    sublaplace.runtime.checkpoint._WRITING_SHARE = float("inf")
    sublaplace.curvature.stream.LARGEST_PORTION = 16
    earlier = json.loads(options.results.read_text()) if options.results.exists() else {}
    deadline = time.monotonic() + 60 * options.minutes
    with tempfile.TemporaryDirectory() as folder:
        soak = Soak(Path(folder), int(time.time()) if options.seed is None else options.seed)
        while time.monotonic() < deadline:
            for disturbance in (
                *[soak.killed_fit] * 10,
                *[soak.killed_rank] * 4,
                soak.full_disk,
                soak.damaged_files,
                soak.damaged_checkpoint,
                soak.interrupted_predictions,
                soak.concurrent_predictions,
            ):
                disturbance()
    earlier_counts = earlier.get("counts", {})
    counts = {name: earlier_counts.get(name, 0) + number for name, number in soak.counts.items()}
    result = {
        "counts": earlier_counts | counts,
        "wrong": earlier.get("wrong", []) + soak.wrong,
        "minutes": round(earlier.get("minutes", 0) + options.minutes, 2),
    }
    options.results.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))
    return 1 if soak.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
