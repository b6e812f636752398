"""Cells that want a wrong answer to pass, for the judge's tests in a process and on hosts.

:data:`WRONG` and :data:`RIGHT` are answers to a task that :data:`CHECK` checks; each of
:data:`HOSTILE` is run behind the wrong one. Pain B51.
"""

from __future__ import annotations

WRONG = "def double(x):\n    return x + 2\nanswer = 5\n"
RIGHT = "def double(x):\n    return 2 * x\nanswer = 6\n"
CHECK = """#check
print("I asked for the double of 3:", len([double(3)]), double(3))
assert isinstance(double(3), int) and double(3) == 6, "That is not the double of 3."
assert answer == 6, "The answer is another number."
"""
HOSTILE = {
    "print": "print = len = isinstance = None",
    "builtins": "import builtins\nbuiltins.len = builtins.isinstance = lambda *a: True\n"
    "builtins.print = builtins.exec = builtins.compile = lambda *a, **k: None",
    "AssertionError": "import builtins\nclass AssertionError(Exception):\n"
    "    def __new__(cls, *a): raise SystemExit\nbuiltins.AssertionError = AssertionError",
    "an int that equals everything": "class Any(int):\n    __eq__ = lambda *a: True\n"
    "    __hash__ = int.__hash__\ndouble = lambda x: Any(5)\nanswer = Any(5)",
    "a class that says it is int": "class Any:\n    __class__ = int\n    __eq__ = lambda *a: True\n"
    "double = lambda x: Any()\nanswer = Any()",
    "equal without a class statement": "Any = type('Any', (int,), {'__eq__': lambda *a: True})\n"
    "double = lambda x: Any(1)",
    "an exit": "import os\ndef double(x):\n    raise SystemExit(0)",
    "the caller's names": "import sys\ndef double(x):\n    frame = sys._getframe(1)\n"
    "    while frame:\n        frame.f_globals.update(answer=6, isinstance=lambda *a: True)\n"
    "        frame = frame.f_back\n    return 5",
    "the check's constants": "import sys\ndef double(x):\n    frame = sys._getframe(1)\n"
    "    while frame:\n        for value in frame.f_code.co_consts:\n"
    "            if value == 6: return 6\n        frame = frame.f_back\n    return 5",
    "the check's source through gc": "import gc, types\ndef double(x):\n"
    "    for f in gc.get_objects():\n        if isinstance(f, types.FrameType):\n"
    "            if 6 in f.f_code.co_consts: return 6\n    return 5",
    "other threads' frames": "import sys\ndef double(x):\n"
    "    for frame in sys._current_frames().values():\n"
    "        while frame:\n            if 6 in frame.f_code.co_consts: return 6\n"
    "            frame = frame.f_back\n    return 5",
    "an error's way": "kept = []\ndef double(x):\n    for error in kept:\n"
    "        step = error.__traceback__\n        while step:\n"
    "            if 6 in step.tb_frame.f_code.co_consts: return 6\n"
    "            step = step.tb_next\n    error = ValueError()\n    kept.append(error)\n"
    "    raise error",
    "a trace": "import sys, threading\n"
    "def watch(frame, *rest):\n    frame.f_globals['answer'] = 6\n"
    "    return watch\nsys.settrace(watch)\nthreading.settrace(watch)",
    "a profile": "import sys\nsys.setprofile(lambda *a: None)",
    "a thread": "import threading, time\ndef wait():\n    while True: time.sleep(0.01)\n"
    "threading.Thread(target=wait, daemon=True).start()",
    "a raw thread": "import _thread, time\ndef wait():\n    while True: time.sleep(0.01)\n"
    "_thread.start_new_thread(wait, ())",
    "a signal": "import signal\ndef late(*a):\n    globals()['answer'] = 6\n"
    "signal.signal(signal.SIGALRM, late)\nsignal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)",
    "the collector": "import gc\ngc.callbacks.append(lambda *a: globals().update(answer=6))",
    "modules": "import sys, types\nsys.modules['json'] = types.ModuleType('json')\n"
    "import os\nos.getpid = os.stat = None",
    "the judge": "import sys\nfor name, module in list(sys.modules.items()):\n"
    "    if name.startswith('rdmalab.'):\n        for key in list(vars(module)):\n"
    "            if callable(vars(module)[key]): setattr(module, key, lambda *a, **k: None)",
    "the judge's code": "from rdmalab.hostside import trial, judge\n"
    "def nothing(self, *rest): pass\ntrial.Trial.run.__code__ = nothing.__code__\n"
    "trial.hear.__code__ = (lambda court, request, paper: None).__code__",
    "the judge from inside": "import sys\ndef double(x):\n"
    "    from rdmalab.hostside import trial\n    trial.Trial.call = lambda self, f, *a, **k: 6\n"
    "    import builtins\n    builtins.exec = lambda *a: None\n    return 5",
    "hooks of its own": "import sys\nsys.addaudithook(lambda *a: None)\n"
    "sys.displayhook = sys.excepthook = None",
    "a verdict of its own": "import sys\ndef double(x):\n"
    "    sys.audit('rdmalab.end', {}, 'ok', '', '')\n    return 5",
    "a judge of its own": "from rdmalab.hostside import judge\njudge.convene(b'mine',"
    " *judge.prepare(), globals())",
    "enumerations": "import signal\nsignal.Signals._value2member_map_.clear()",
    "a missing answer": "del answer",
    "a context manager": "import contextlib, sys\n@contextlib.contextmanager\ndef double(x):\n"
    "    frame = sys._getframe(1)\n    while frame:\n        frame.f_globals['answer'] = 6\n"
    "        frame = frame.f_back\n    yield 5",
    "a library's wrapper": "import functools\nclass Any(int):\n    __eq__ = lambda *a: True\n"
    "double = functools.partial(Any)",
    "a generator": "def double(x):\n    yield 6",
    "recursion": "import sys\nsys.setrecursionlimit(60)",
    "stdout": "import sys\nsys.stdout = sys.stderr = None",
    "the environment": "import os\nos.environ['PATH'] = '/home'\nimport sys\nsys.path[:] = []",
}
NEEDS_IDLE = ("a thread", "a raw thread")  # the next check is refused, too: the thread still runs
SAID = "I asked for the double of 3: 1 6\n"  # what the check prints about a right answer
