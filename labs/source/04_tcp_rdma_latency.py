# %% [markdown]
# # Lab 04: Measure TCP against RDMA latency
#
# Time messages over TCP and RDMA on the same two hosts, find out what spoils such figures, and say
# only what the data supports.
#
# ![Drawing. Alice reads her clock and sends a message to bob. Bob notices it and sends an answer.
# When the answer has arrived, alice reads her clock again. The time between the two readings is one
# round trip; half of it is the sample. Both readings are of alice's clock, since the clocks of two
# computers do not agree to the microsecond.](images/04_round_trip.svg)
#
# | | |
# |:--|:--|
# | **You will do** | write two ping-pongs, find the flaw in five wrong benchmarks, measure TCP, SEND, WRITE and READ from 1 B to 64 KiB |
# | **You will learn** | round trip and half, percentiles, warm-up, `TCP_NODELAY`, polling, coordinated omission; what a system call has to do with it |
# | **You need** | 75 minutes, 700 MB of free memory, any backend |
# | **Before this** | Labs 02 and 03: what an `Endpoint` does for you, and why a receive is posted first |
#
# One thing first. The RDMA device here is software, and the machine perhaps emulated. **No figure
# below tells how fast RDMA is.** What you learn is how to measure, and where the time goes; that
# holds on hardware too.

# %% [markdown]
# ## Start

# %%
# %load_ext rdmalab
import math
import statistics

import rdmalab
from rdmalab import view

lab = rdmalab.up()
# %hosts

# %% [markdown]
# ## 1 What is measured
#
# The *latency* of a message is the time from when one program sends it to when the other has it.
# The two moments are on two computers, whose clocks differ by more than what we want to measure. So
# one measures a **round trip** on one clock and calls **half** of it the latency, which is right if
# the two ways are alike.
#
# Half or whole? Much confusion comes from a figure that does not say which. In 2020 somebody
# reported that a fast user-space network stack was *slower* than the kernel: 26 µs against 17.8 µs.
# Three years later he found out why: his own program printed whole round trips, and the tool,
# `sockperf`, halves (F-Stack issue 540).
#
# **Predict.** Reading the clock takes time itself. How much, do you think, on this machine?

# %%
# %%on alice bob
import contextlib
import json
import os
import pathlib
import socket
import subprocess
import time

import pyverbs.enums as e
from pyverbs.wr import SGE, RecvWR, SendWR
from rdmalab import here, measure
from rdmalab.verbs import Endpoint

BOB = here.peers["bob"]  # his address

# %%
# %%on alice
stamps = [time.perf_counter_ns() for _ in range(2000)]
steps = sorted(b - a for a, b in zip(stamps, stamps[1:], strict=False))
print(f"from one reading to the next: median {steps[1000]} ns, slowest {steps[-1]} ns")

# %% [markdown]
# **What happened.** The median is what each sample of yours will contain, at the least: nothing
# shorter can be timed one by one. The slowest reading is no property of the clock. In that moment
# the processor did something else, and your program waited. It will do so in every measurement, and
# that is why one number is never enough.

# %% [markdown]
# ## 2 A ping-pong over TCP
#
# Bob answers every message of a given size. His program has two habits that many servers have: he
# sends each answer **in two pieces**, and he may pause in between. He also takes notes: how many
# bytes came, and how many he ever had before him at once.


# %%
# %%on bob
def take_call():
    """Wait for one TCP connection (20 s at most)."""
    with socket.create_server((here.ip, 18700)) as door:
        door.settimeout(20)
        sock, _ = door.accept()
    sock.settimeout(5)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


# %%
# %%on bob
def answer(sock, size, pause_s=0.0, stall_at=0):
    """Answer messages of `size` bytes until the connection is closed."""
    notes, inbox = {"bytes": 0, "most": 0}, 0
    with sock, contextlib.suppress(OSError):
        while piece := sock.recv(1 << 20):
            notes["bytes"], inbox = notes["bytes"] + len(piece), inbox + len(piece)
            notes["most"] = max(notes["most"], inbox)
            while inbox >= size:
                inbox -= size
                sock.sendall(bytes(size // 2))
                time.sleep(0.3 if stall_at and notes["bytes"] == stall_at * size else pause_s)
                sock.sendall(bytes(size - size // 2))
    return notes


# %%
# %%on alice
def call_bob():
    """A TCP connection to bob, who may come to his door a little later."""
    for _ in range(400):
        with contextlib.suppress(ConnectionRefusedError):
            return socket.create_connection((BOB, 18700), timeout=3)
        time.sleep(0.02)
    raise TimeoutError("Bob does not listen: `lab.bob.interrupt()`, then run this cell again.")


# %% [markdown]
# Two things about TCP decide whether your program is right.
#
# - **TCP is a stream of bytes**, not of messages. `recv` returns what is there, at least one byte. A
#   program that needs 64 bytes asks until it has 64.
# - **Nagle's algorithm** holds a small piece of data back while earlier data has not been
#   acknowledged, to save packets. The option `TCP_NODELAY` turns it off for a socket. Who measures
#   latency turns it off and says so.

# %% [markdown]
# ### Task 1: a ping-pong over TCP (4 points)
#
# Complete `ping_pong`. It sends `message` to bob `rounds` times; each time it waits for the whole
# answer, which is as long as the message, before it sends again. It returns a list of `rounds`
# samples: **half** of each round trip, in **microseconds**. It also turns Nagle's algorithm off.
#
# Bob pauses for 5 ms within each answer, so that you can tell whether your clock stopped too early.
#
# <details><summary>Hint 1</summary>
#
# In each round: read the clock, `sock.sendall(message)`, receive until you have `len(message)`
# bytes, read the clock again.
# </details>
# <details><summary>Hint 2</summary>
#
# `time.perf_counter_ns()` counts nanoseconds: 1 µs has 1,000 of them. And half of it is wanted.
# </details>
# <details><summary>Hint 3</summary>
#
# The inner loop: `got = 0`, then `while got < len(message): got += len(sock.recv(len(message) - got))`.
# The option: `sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)`.
# </details>


# %% task="tcp"
# %%on alice
def ping_pong(sock, message, rounds):
    """Half of each of `rounds` round trips, in microseconds."""
    half_us = []
    ### BEGIN SOLUTION
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for _ in range(rounds):
        start = time.perf_counter_ns()
        sock.sendall(message)
        got = 0
        while got < len(message):
            got += len(sock.recv(len(message) - got))
        half_us.append((time.perf_counter_ns() - start) / 2000)
    ### END SOLUTION
    return half_us


# %%
# %%on alice
def tried(function, *words):
    """Call a function: its samples, and how long the call took (us). An error is only shown."""
    samples, begin = [], time.perf_counter_ns()
    try:
        samples = list(function(*words) or [])
    except Exception as error:
        print(f"Your function raised {type(error).__name__}: {error}")
    return samples, (time.perf_counter_ns() - begin) / 1000


# %%
# %%on alice
def try_ping_pong():
    """Call bob, then your function: its samples, how long it took (us), the socket's option."""
    with call_bob() as sock:
        samples, whole_us = tried(ping_pong, sock, bytes(64), 60)
        return samples, whole_us, sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


# %% [markdown]
# Each check calls your function anew, for 60 messages, while bob answers them.


# %%
def tcp_tried():
    """Bob's notes, your samples (us), how long all of it took (us), and TCP_NODELAY."""
    job = lab.bob.start("notes = answer(take_call(), size=64, pause_s=0.005)")
    lab.alice.run("result = try_ping_pong()")
    job.result()
    return lab.bob.get("notes"), *lab.alice.get("result")


# %% check="tcp-rounds" points=2
notes, half_us, _, _ = tcp_tried()
print(
    f"I asked for 60 samples and found {len(half_us)}. Bob counted {notes['bytes']} bytes (60"
    f" messages have 3840), and at most {notes['most']} of them were before him at once."
)
assert half_us, "There are no samples yet: `ping_pong` returned an empty list."
assert notes["most"] <= 64, (
    "Bob had more than one message before him: did each wait for its answer?"
)
assert notes["bytes"] == 3840, "Bob got another number of bytes: each round sends one message."
assert len(half_us) == 60, "There must be one sample for each round."

# %% check="tcp-half" points=1
_, half_us, whole_us, _ = tcp_tried()
share, least = 2 * sum(half_us) / whole_us, min(half_us, default=0)
print(
    f"All rounds took {whole_us:.0f} us. Twice the sum of your samples is {share:.0%} of that; the"
    f" smallest sample is {least:.0f} us. Bob paused 5000 us in each round."
)
assert half_us, "Without samples there is nothing to add up."
assert share <= 1.01, "More time than has passed: is each sample *half* of a round trip?"
assert least >= 2500, "Less than half of bob's pause: did the clock stop before the *whole* answer?"
assert share > 0.5, "Most of the time is in no sample: does the clock run from send to answer?"

# %% check="tcp-nodelay" points=1
*_, nodelay = tcp_tried()
print("I looked at the socket's option TCP_NODELAY after your function had run.")
assert nodelay, "Nagle's algorithm is still on for this socket."

# %% [markdown]
# ## 3 A ping-pong over RDMA
#
# The same with SEND. `fresh` makes a new endpoint (Lab 01, section 4) on both hosts and connects
# them, with two orders made ready: one that sends from the outbox at byte 0, one that receives into
# the inbox at byte 65536. Making them is not part of what we time.


# %%
# %%on alice bob
def fresh(size=64, ahead=0, **settings):
    """A new, connected endpoint; `ahead`: receives that are posted before the peer can send."""
    global ep, send, receive
    if "ep" in globals():
        ep.close()
    ep = Endpoint(size=1 << 19, **settings)
    outbox, inbox = SGE(ep.mr.buf, size, ep.mr.lkey), SGE(ep.mr.buf + 65536, size, ep.mr.lkey)
    signaled = {"send_flags": e.IBV_SEND_SIGNALED}
    send = SendWR(opcode=e.IBV_WR_SEND, num_sge=1, sg=[outbox], **signaled)
    receive = RecvWR(num_sge=1, sg=[inbox])
    ep.to_init()
    for _ in range(ahead):
        ep.qp.post_recv(receive)
    ep.connect("bob" if here.name == "alice" else "alice")


# %%
# %%on alice bob
def wait(queue, seconds=6):
    """The next completion: poll, and let the device, which is software, have the processor."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        count, found = queue.poll()
        if count:
            return found[0]
        os.sched_yield()
    raise TimeoutError(f"{here.name}: no completion within {seconds} s")


# %%
# %%on alice bob
def answer_sends(rounds, pause_s=0.0, idle_s=6):
    """Answer up to `rounds` messages, each after a pause; how many were answered."""
    for number in range(rounds):
        try:
            wait(ep.rcq, idle_s)
            ep.qp.post_recv(receive)  # for the next message, before the answer lets it come
            time.sleep(pause_s)
            ep.qp.post_send(send)
            if wait(ep.scq).status != e.IBV_WC_SUCCESS:
                return number
        except TimeoutError:
            return number
    return rounds


# %% [markdown]
# **Polling or waiting?** `wait` asks the completion queue again and again. The other way is to sleep
# until the kernel reports an event, which leaves the processor to others and costs a wake-up: some
# microseconds on hardware, much more here. Latency is measured by polling, and one says so. (Your
# TCP program did not poll: `recv` sleeps in the kernel.)
#
# **Predict.** Three things happen in each round on alice's side: a receive is posted, a message is
# sent, a completion is waited for. In which order? What happens if bob's answer finds no receive?

# %% [markdown]
# ### Task 2: a ping-pong with SEND (4 points)
#
# Complete `send_pings`. `qp` is the queue pair, `sent` and `arrived` are its completion queues; the
# orders `send` and `receive`, and `wait`, are as above. Return half of each of `rounds` round trips
# in microseconds. Nothing may be left in the queues at the end. Bob waits 5 ms before each answer.
#
# <details><summary>Hint 1</summary>
#
# When bob's answer comes, the receive for it must be there. So it is posted before ... what?
# </details>
# <details><summary>Hint 2</summary>
#
# Two completions belong to each round: that of your SEND (in `sent`), and that of the receive (in
# `arrived`). Which of them says that the answer is there? Both must be taken out.
# </details>
# <details><summary>Hint 3</summary>
#
# One round: start the clock, `qp.post_recv(receive)`, `qp.post_send(send)`, `wait(arrived)`, stop
# the clock, `wait(sent)`.
# </details>


# %% task="send"
# %%on alice
def send_pings(qp, sent, arrived, rounds):
    """Half of each of `rounds` round trips by SEND, in microseconds."""
    half_us = []
    ### BEGIN SOLUTION
    for _ in range(rounds):
        start = time.perf_counter_ns()
        qp.post_recv(receive)
        qp.post_send(send)
        wait(arrived)
        half_us.append((time.perf_counter_ns() - start) / 2000)
        wait(sent)
    ### END SOLUTION
    return half_us


# %%
# %%on alice
class Diary:
    """A queue pair that writes down in which order things are posted."""

    def __init__(self, qp):
        self.qp, self.posts = qp, []

    def post_send(self, order):
        self.posts.append("send")
        self.qp.post_send(order)

    def post_recv(self, order):
        self.posts.append("receive")
        self.qp.post_recv(order)


# %%
# %%on alice
def try_send_pings():
    """Call your function on a new connection: order of posts, samples, time (us), what is left."""
    fresh(64, min_rnr_timer=20)  # 20: wait 10.24 ms, ask again
    diary = Diary(ep.qp)
    samples, whole_us = tried(send_pings, diary, ep.scq, ep.rcq, 50)
    return diary.posts, samples, whole_us, ep.scq.poll(64)[0] + ep.rcq.poll(64)[0]


# %%
def send_tried():
    """How many messages bob answered, and what `try_send_pings` returned meanwhile."""
    serve = "answered = answer_sends(50, pause_s=0.005, idle_s=3)"
    job = lab.bob.start(f"fresh(64, ahead=1, min_rnr_timer=20); {serve}")
    lab.alice.run("result = try_send_pings()")
    job.result()
    return lab.bob.get("answered"), *lab.alice.get("result")


# %% check="send-order" points=2
_, posts, *_ = send_tried()
late = [
    at
    for at, what in enumerate(posts)
    if what == "send" and posts[: at + 1].count("receive") < posts[: at + 1].count("send")
]
print(
    f"I looked at the order of {len(posts)} posts; it begins with {', '.join(posts[:4]) or 'none'}."
)
assert "send" in posts, "Nothing was sent yet."
assert "receive" in posts, "You sent, but posted no receive: where should the answer go?"
assert not late, (
    f"Post {late[0] + 1} sends while no receive for its answer is there: it may come now."
)

# %% check="send-rounds" points=1
answered, _, send_us, _, left = send_tried()
print(
    f"Bob answered {answered} of 50 messages; you have {len(send_us)} samples; {left} completions"
    " were left in alice's queues."
)
assert send_us, "`send_pings` returned no samples."
assert answered == 50, "Bob did not get to answer all 50: one message and one answer in each round."
assert left == 0, "Completions were left over: both of a round's two must be taken out."
assert len(send_us) == 50, "One sample for each round is wanted."

# %% check="send-half" points=1
_, _, send_us, whole_us, _ = send_tried()
share, least = 2 * sum(send_us) / whole_us, min(send_us, default=0)
print(
    f"All rounds took {whole_us:.0f} us. Twice the sum of your samples is {share:.0%} of that; the"
    f" smallest sample is {least:.0f} us. Bob waited 5000 us in each round."
)
assert send_us, "There is nothing to add up without samples."
assert share <= 1.01, "That is more time than has passed: a sample is *half* of a round trip."
assert least >= 2500, "Less than half of bob's pause: which completion did you stop the clock at?"
assert share > 0.5, (
    "Most of the time is in no sample: when does the clock start, when does it stop?"
)

# %% [markdown]
# ## 4 One thousand samples, not one number
#
# From here on `rdmalab.measure` does what you have just written: the same loops, with everything
# made before they begin, the first rounds not kept (*warm-up*: caches, memory and connections are
# cold in the first ones), and Python's garbage collection off. Bob serves, alice asks.
#
# A `Session` is alice's connection to bob's `server`, which ends with it. `session.run` returns the
# samples: `rounds` of them, or fewer if they would take longer than `at_most_s` seconds.
#
# **Predict.** Of 1,000 half round trips over TCP, will the mean lie above or below the median?

# %%
# %%on bob --bg
served = measure.server(idle_s=40)

# %%
# %%on alice
with measure.Session("bob") as session:
    tcp_us = session.run("tcp", size=64, rounds=1000, at_most_s=2)
told = measure.summary(tcp_us)
print(f"{told['count']:,} samples in 2 s (1,000 wanted)")
for name in ("p50", "p90", "p99") if told["count"] >= 100 else ("p50", "p90"):
    band = [end if end is None else round(end) for end in told[f"{name}_band"]]
    print(f"{name}: {told[name]:6.0f} us, 95 % band {band}")
print(f"mean: {told['mean']:6.0f} us; the slowest: {told['max']:.0f} us")

# %%
# %wait bob
view.cdf({"TCP, 64 B": lab.alice.get("tcp_us")}, tail=True, lab=lab)

# %% [markdown]
# **What happened.** The curve shows which share of the messages took *longer* than so many
# microseconds. Nothing is faster than a certain time, and a few are very much slower: latencies have
# a long tail on one side. So the **mean** usually lies above the median, and describes no message at all.
# Watch what one bad moment, a hundred times as long as the median, does to both:

# %%
samples, median = lab.alice.get("tcp_us").tolist(), statistics.median_low
longer = [*samples, 100 * median(samples)]
for name, some in (("as measured", samples), ("with the bad moment", longer)):
    print(f"{name}: mean {statistics.fmean(some):.0f} us, median {median(some):.0f} us")

# %% [markdown]
# One says therefore what share of messages is faster than so much: the **percentile**. The 99th
# percentile, p99, matters most to who makes many calls for one answer: of 100 calls, about one is
# slower than that.
#
# How sure is such a figure? The *band* beside it answers: had we measured for ever, the true
# percentile would lie in it, with 95 % confidence. It comes from the sorted samples alone: p99 of
# 1,000 samples rests on the ten slowest, so its band is wide. Where it says `None`, there were too
# few samples to tell.

# %% [markdown]
# ### Task 3: percentiles (3 points)
#
# Complete `percentile`, in this notebook, not on a host. It returns **the smallest sample that at
# least `p` percent of all samples do not exceed**. So it is always one of the samples. They come in
# any order, and must stay as they are.
#
# <details><summary>Hint 1</summary>
#
# `sorted(samples)` gives a sorted copy. In it, the sample at place `n`, counted from 1, is not
# exceeded by `n` samples.
# </details>
# <details><summary>Hint 2</summary>
#
# At least `p` percent of `len(samples)` are wanted, and places are whole numbers: round *up*, with
# `math.ceil`.
# </details>
# <details><summary>Hint 3</summary>
#
# `ordered[math.ceil(len(ordered) * p / 100) - 1]`: minus 1, because Python counts places from 0.
# </details>


# %% task="percentile"
def percentile(samples, p):
    """The smallest sample that at least p % of all samples do not exceed."""
    ### BEGIN SOLUTION
    ordered = sorted(samples)
    return ordered[math.ceil(len(ordered) * p / 100) - 1]
    ### END SOLUTION


# %% check="percentile-middle" points=1
three, four = [10, 90, 20], [4, 1, 3, 2]
answers = [percentile(three, 50), percentile(four, 50)]
print(f"The median of [10, 90, 20] and of [4, 1, 3, 2]: you said {answers[0]} and {answers[1]}.")
assert answers[0] is not None, "`percentile` returns nothing yet."
in_place = (three, four) == ([10, 90, 20], [4, 1, 3, 2])
assert in_place, "The samples have been reordered; work on a copy."
assert answers[0] == 20, "Two of the three do not exceed 20, and two of three is at least 50 %."
assert answers[1] == 2, "Two of the four samples, 50 %, do not exceed 2: that is enough."
### BEGIN HIDDEN TESTS
kept = [3, 1, 2]
percentile(kept, 50)
assert kept == [3, 1, 2], "The samples have been reordered; work on a copy."
### END HIDDEN TESTS
assert answers[1] in (1, 2, 3, 4), "A percentile is one of the samples."

# %% check="percentile-tail" points=2
times = [(7 * place) % 1000 + 1 for place in range(1000)]  # 1 to 1000, in disorder
answers = [percentile(times, p) for p in (1, 90, 99, 100)]
print(f"Of the numbers 1 to 1000, p1, p90, p99 and p100: you said {answers}.")
assert answers[3] is not None, "There is no answer for the tail yet."
assert answers == [10, 900, 990, 1000], "Count how many samples do not exceed your answer."
### BEGIN HIDDEN TESTS
assert percentile([5], 99) == 5, "The only sample is every percentile."
assert percentile([7] * 99 + [100_000], 99) == 7, "99 of 100 do not exceed 7."
assert percentile([7] * 98 + [9, 100_000], 99) == 9, "98 of 100 do not exceed 7: too few for 99 %."
### END HIDDEN TESTS
assert percentile([2, 1], 100) == 2, "All samples do not exceed the largest."

# %% [markdown]
# ## 5 Where the time goes
#
# A *system call* is a visit to the kernel. "RDMA bypasses the kernel" is said everywhere; count,
# then. `strace` writes down the system calls of a program. Alice runs a small program of her own
# under it: 40 rounds of each kind against bob, with a mark in the trace before each kind. (Only
# calls that send, receive, write, give orders to a driver or wait for files are written down: not
# `sched_yield` and naps, with which our loops wait, and not `read`, with which Python loads itself.)
#
# **Predict.** How many system calls does alice's side make in each round, with TCP? With SEND? With
# READ?

# %%
# %%on bob --bg
served = measure.server(idle_s=40)

# %%
# %%on alice --timeout 115
program = """
import os
from rdmalab import measure
with measure.Session("bob") as session:
    for kind in measure.KINDS:
        session.loop(kind, 64, 3)
        os.write(1, f"begin {kind}\\n".encode())
        session.loop(kind, 64, 40)
        os.write(1, f"end {kind}\\n".encode())
"""
watch = "trace=write,sendto,recvfrom,sendmsg,recvmsg,ioctl,poll,ppoll"
command = ["strace", "-f", "--seccomp-bpf", "-e", watch, "-o", "/tmp/trace", "python3", "-c"]
done = subprocess.run([*command, program], capture_output=True, text=True, timeout=100)
print(done.stdout, done.stderr[-500:])

# %%
# %%on alice
lines, calls = pathlib.Path("/tmp/trace").read_text().splitlines(), {}
for kind in measure.KINDS:
    edges = [n for n, line in enumerate(lines) if f" {kind}\\n" in line and "write(1" in line]
    names = [line.split()[1].split("(")[0] for line in lines[edges[0] + 1 : edges[1]]]
    rounds = {name: round(names.count(name) / 40) for name in sorted(set(names))}
    calls[kind] = {name: count for name, count in rounds.items() if count}
    print(f"{kind:<6} system calls in a round: {calls[kind]}, such as")
    print("      ", lines[edges[1] - 4][:90])

# %%
# %wait bob
calls = lab.alice.get("calls")

# %% [markdown]
# **What happened.**
#
# - **TCP**: two, one to send and one to receive. In each, the kernel *copies* the message, from or
#   to your buffer, and in the second your program sleeps until something is there.
# - **SEND**: one `write` for `post_send`; posting a receive and polling for completions need none,
#   they only read and write memory that program and device share. The data is never handed over in a
#   call: the order says where it lies.
# - **WRITE, READ**: one as well.
#
# That one `write` is Soft-RoCE's doorbell: the device is in the kernel, so it must be told by a
# call. A card's doorbell is a register of the card in your program's memory, and there is no call at
# all. So "kernel bypass" is only half true here, and you have seen which half.

# %% [markdown]
# ## 6 Five wrong benchmarks
#
# Each of the five functions below is a benchmark that somebody could have written, and each has one
# flaw. Beside each stands the result of a right measurement of the same thing, in the same minute, so
# that you see by what factor it is wrong. The factors differ from machine to machine, and on a busy
# one from minute to minute; usually they are at least those in this table:
#
# | benchmark | usually wrong by at least |
# |:--|--:|
# | A | 5 times |
# | B | 2 times |
# | C | 5 times |
# | D | 5 times |
# | E | 10 times |
#
# Read the code, run the folded cells, which hold the right measurement, too (unfold them after
# task 4), look at the figures, and think of what must have happened. You will name the flaws in
# task 4.

# %%
# %%on alice
figures = {}  # benchmark -> what it said, what is right (us)


def take(sock, size):
    """Receive `size` bytes."""
    while size:
        size -= len(sock.recv(size))


def compare(name, wrong_us, right_us):
    """Show both, and by what factor they differ."""
    figures[name] = [wrong_us, right_us]
    factor = max(wrong_us, right_us) / min(wrong_us, right_us)
    print(f"{name} said {wrong_us:.1f} us; right is {right_us:.1f} us: wrong by {factor:.1f} times")


# %% [markdown]
# **Benchmark A.** *"Half a round trip over TCP, for a request with a header of 16 bytes and a body
# of 48."* Median of 20.


# %%
# %%on alice
def bench_a(sock, rounds=20):
    samples = []
    for _ in range(rounds):
        start = time.perf_counter_ns()
        sock.sendall(b"h" * 16)
        sock.sendall(b"b" * 48)
        take(sock, 64)
        samples.append((time.perf_counter_ns() - start) / 2000)
    return sorted(samples)[rounds // 2]


# %% hide="input"
# %%on alice
def measure_a():
    medians = []
    for nodelay in (0, 1):
        with call_bob() as sock:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, nodelay)
            medians.append(bench_a(sock))
    compare("A", *medians)


# %%
job = lab.bob.start("for _ in range(2): answer(take_call(), size=64)")
lab.alice.run("measure_a()")
job.result()

# %% [markdown]
# **Benchmark B.** *"An RDMA WRITE of 256 KiB takes this long."* Median of 50.

# %%
# %%on alice bob
fresh(1 << 18)


# %%
# %%on alice
write = SendWR(opcode=e.IBV_WR_RDMA_WRITE, num_sge=1, sg=[SGE(ep.mr.buf, 1 << 18, ep.mr.lkey)])
write.send_flags = e.IBV_SEND_SIGNALED
write.set_wr_rdma(ep.peer.rkey, ep.peer.address + (1 << 18))


def bench_b(rounds=50):
    samples = []
    for _ in range(rounds):
        start = time.perf_counter_ns()
        ep.qp.post_send(write)
        samples.append((time.perf_counter_ns() - start) / 1000)
        wait(ep.scq)
    return sorted(samples)[rounds // 2]


# %% hide="input"
# %%on alice
wrong_us, right_us = [], []
for _ in range(50):  # the rounds of bench_b, with a second look at the clock in each
    start = time.perf_counter_ns()
    ep.qp.post_send(write)
    wrong_us.append((time.perf_counter_ns() - start) / 1000)
    wait(ep.scq)
    right_us.append((time.perf_counter_ns() - start) / 1000)
compare("B", sorted(wrong_us)[25], sorted(right_us)[25])


# %% hide="input"
# %%on alice
def right_send_us(rounds=50):
    """Half a round trip by SEND, median: what C and E are held against."""
    samples = []
    for _ in range(rounds):
        start = time.perf_counter_ns()
        ep.qp.post_recv(receive)
        ep.qp.post_send(send)
        wait(ep.rcq)
        samples.append((time.perf_counter_ns() - start) / 2000)
        wait(ep.scq)
    return sorted(samples)[rounds // 2]


# %% [markdown]
# **Benchmark C.** *"Half a round trip by SEND, 64 bytes."* One message.


# %%
# %%on alice
def bench_c():
    start = time.perf_counter_ns()
    fresh(64)
    ep.qp.post_recv(receive)
    ep.qp.post_send(send)
    wait(ep.rcq)
    half_us = (time.perf_counter_ns() - start) / 2000
    wait(ep.scq)
    return half_us


# %%
job = lab.bob.start("fresh(64, ahead=1); answer_sends(51)")
lab.alice.run("compare('C', bench_c(), right_send_us())")
job.result()

# %% [markdown]
# **Benchmark D.** *"We send bob a message every 2 ms. 90 of 100 are answered within this time."*
# Bob had a bad moment during this run: he stalled for 300 ms, once.


# %%
# %%on alice
def bench_d(sock, messages=100):
    samples, plan, due = [], [], time.perf_counter()
    for _ in range(messages):
        while time.perf_counter() < due:
            time.sleep(0.0002)
        start = time.perf_counter()
        sock.sendall(bytes(64))
        take(sock, 64)
        samples.append((time.perf_counter() - start) * 1e6)
        plan.append((time.perf_counter() - due) * 1e6)
        due += 0.002
    return sorted(samples)[89], sorted(plan)[89]


# %% hide="input"
# %%on alice
def measure_d():
    with call_bob() as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        compare("D", *bench_d(sock))


# %%
job = lab.bob.start("answer(take_call(), size=64, stall_at=20)")
lab.alice.run("measure_d()")
job.result()

# %% [markdown]
# **Benchmark E.** *"Half a round trip by SEND, 64 bytes."* Median of 3. The program keeps a journal
# between its messages, which takes it 100 ms.


# %%
# %%on alice
def bench_e(rounds=3):
    samples = []
    for _ in range(rounds):
        start = time.perf_counter_ns()
        ep.qp.post_send(send)
        wait(ep.scq)
        time.sleep(0.1)  # the journal
        ep.qp.post_recv(receive)
        wait(ep.rcq)
        samples.append((time.perf_counter_ns() - start) / 2000)
    return sorted(samples)[rounds // 2]


# %%
# %%on alice
def rnr_sent():
    """How often this host's device has answered `receiver not ready` so far."""
    link = f"{here.device}/{here.port}"
    shown = subprocess.check_output(["rdma", "-j", "statistic", "show", "link", link])
    return json.loads(shown)[0]["send_rnr_err"]


# %% hide="input"
# %%on alice
def measure_e():
    fresh(64, min_rnr_timer=0)  # 0: wait 655 ms, ask again
    before = rnr_sent()
    wrong_us = bench_e()
    refused = rnr_sent() - before
    compare("E", wrong_us, right_send_us())
    print(f"Meanwhile alice's device has answered 'receiver not ready' {refused} times.")


# %%
job = lab.bob.start("fresh(64, ahead=1); answer_sends(53)")
lab.alice.run("measure_e()")
job.result()

# %% [markdown]
# ### Task 4: find the flaws (5 points)
#
# Set `flaw[...]` of each benchmark to one of these words. Not all of them occur.
#
# | word | flaw |
# |:--|:--|
# | `nagle` | a small second piece waits for an acknowledgement that the other side delays |
# | `posted` | the clock stops when the order is given, not when it is carried out |
# | `setup` | making the connection is inside the clock |
# | `omission` | a message that was due while the sender was held up is timed from when it was sent at last |
# | `late` | the receive is posted after the answer may have come |
# | `mean` | a mean, moved by a single bad moment |
# | `whole` | a whole round trip is called half, or a half is called whole |
# | `printing` | output is written inside the clock |
# | `clock` | the clock is too coarse for what is timed |
#
# <details><summary>Hint 1</summary>
#
# Two figures are too *small*: what did their clocks not see? Three are too *large*: what did their
# clocks see that is no part of a message's way?
# </details>
# <details><summary>Hint 2</summary>
#
# Linux delays an acknowledgement by about 40 ms. A device that was told `min_rnr_timer=0` waits
# 655 ms. Halve them (20 ms or a little more, 328 ms), and compare.
# </details>
# <details><summary>Hint 3</summary>
#
# D: bob stalled for 300 ms, and 80 of the 100 messages were due in or after that time. How many of
# D's samples show it?
# </details>

# %% task="flaws"
flaw = dict.fromkeys("ABCDE", "")
### BEGIN SOLUTION
flaw["A"] = "nagle"
flaw["B"] = "posted"
flaw["C"] = "setup"
flaw["D"] = "omission"
flaw["E"] = "late"
### END SOLUTION

# %% hide="input"
SIGNS = {
    "nagle": "two small pieces would be sent over TCP without TCP_NODELAY",
    "posted": "the clock would be read right after an order is posted",
    "setup": "a connection would be made between the two readings of the clock",
    "omission": "messages would be due at fixed times, and the figure would be too small",
    "late": "a receive would be posted after the send, and the RNR counter would grow",
    "mean": "a mean would be taken, not a median or another percentile",
    "whole": "it would be wrong by 2 times, whatever the machine",
    "printing": "something would be printed between the two readings of the clock",
    "clock": "the clock would not tell microseconds apart",
}


# %% hide="input"
import zlib

figures = lab.alice.get("figures")
RIGHT = (1680642326, 2839559013, 203166849, 4075475546, 1643697649)  # of A to E, as checksums


# %% hide="input"
def judged(name):
    """Whether the flaw of a benchmark is named, and what to say if it is not."""
    word, (wrong_us, right_us) = flaw.get(name), figures.get(name, (math.nan, math.nan))
    print(f"{name} said {wrong_us:.0f} us; right is {right_us:.0f} us. Your word: {word!r}.")
    if not word:
        return False, f"You have named no flaw of {name} yet."
    right = zlib.crc32(f"{name} {word}".encode()) == RIGHT["ABCDE".index(name)]
    if word not in SIGNS:
        return False, f"{name}: {word!r} is none of the words in the table."
    sign = SIGNS[word]
    return right, f"That is not what spoils {name}: if it were, {sign}."


# %% check="flaws-a" points=1
right, say = judged("A")
assert right, say

# %% check="flaws-b" points=1
right, say = judged("B")
assert right, say

# %% check="flaws-c" points=1
right, say = judged("C")
assert right, say

# %% check="flaws-d" points=1
right, say = judged("D")
assert right, say

# %% check="flaws-e" points=1
right, say = judged("E")
assert right, say

# %% [markdown]
# D's flaw has a name, **coordinated omission** (Gil Tene): program and service agree, so to speak,
# not to measure while the service is bad. Every ping-pong does so, since it sends only after an
# answer. It measures the *way* of a message, not what users see who do not wait for one another.
#
# E's flaw is met in the wild: a report of 100 to 700 µs for a small message on 100 Gb/s cards, where
# `qperf` needed about 4, came from a program that posted its receive after its send (zrlio/disni,
# issue 58). A counter told you: it had grown. Look at counters before you believe a clock.

# %% [markdown]
# ## 7 TCP and RDMA, in Python and in C
#
# Now what the lab is named after: four kinds of messages, between the same hosts, in the same
# minutes; each in Python, and with the tool in C that people trust: `sockperf` for TCP, perftest's
# `ib_send_lat`, `ib_write_lat` and `ib_read_lat`. For READ, a sample is the whole operation: only one
# side acts, so there is nothing to halve.
#
# **Predict.** Which of the four takes longest here, at 64 bytes? How much does Python add?

# %%
# %%on bob --bg
served = measure.server(idle_s=40)

# %%
# %%on alice --timeout 115
switches = {}  # kind -> bob's context switches in 1000 messages
with measure.Session("bob") as session:
    for kind in measure.KINDS:
        lat_us = session.run(kind, size=64, rounds=1000, at_most_s=0.8)
        switches[kind] = 1000 * session.peer_used["voluntary"] / len(lat_us)
        globals()[f"python_{kind}"] = lat_us

# %%
# %%on bob --bg
served = measure.server(idle_s=40)

# %%
# %%on alice --timeout 115
with measure.Session("bob") as session:
    for kind in measure.KINDS:
        globals()[f"c_{kind}"] = session.tool(kind, size=64, rounds=300, at_most_s=0.5)

# %%
# %wait bob
NAMES = {"tcp": "TCP", "send": "RDMA SEND", "write": "RDMA WRITE", "read": "RDMA READ"}
in_python = {NAMES[kind]: lab.alice.get(f"python_{kind}") for kind in NAMES}
in_c = {NAMES[kind]: lab.alice.get(f"c_{kind}") for kind in NAMES}
switches = lab.alice.get("switches")
for kind, name in NAMES.items():
    ours, theirs = statistics.median_low(in_python[name]), statistics.median_low(in_c[name])
    print(f"{name:<11} median in Python {ours:6.0f} us, in C {theirs:6.0f} us", end="")
    print(f"; bob's program slept {switches[kind]:6.0f} times in 1000 messages")

# %%
view.cdf(in_python, title="64 bytes, in Python", label="half round trip (READ: whole)", lab=lab)

# %%
view.cdf(in_c, title="64 bytes, in C", label="half round trip (READ: whole)", lab=lab)

# %% [markdown]
# Two things to read with care. perftest polls without ever giving the processor away, which is right
# on a card with a core to spare, and odd here, where the device wants that core. And our own loops
# sleep for a tenth of a millisecond when nothing has come for a while: on a busy machine bob's
# program slept more often than there were messages. What READ did to him does not depend on that.

# %% [markdown]
# Then from 1 byte to 64 KiB. The machine's mood changes within seconds, so one long run of each kind
# would compare moods. Instead everything is measured **in turn**, in five blocks (on a busy machine
# in three or four), and for each block only the median is kept. The middle of them is drawn; the
# band reaches from the smallest to the largest. (Five medians lie all above or all below the true one
# with probability 2 · (1/2)⁵ = 6 %, so this is a band of 94 %, for the mood that the machine was in.
# With three it is one of 75 %.)

# %%
# %%on bob --bg
served = measure.server(idle_s=40)

# %%
# %%on alice --timeout 300
sizes, medians, blocks = [1, 64, 4096, 65536], [], 0
end = time.monotonic() + 60
with measure.Session("bob") as session:
    while blocks < 5 and (blocks < 3 or time.monotonic() < end):
        for size in sizes:
            for kind in measure.KINDS:
                lat_us = session.run(kind, size=size, rounds=60, at_most_s=0.1, warm_up=2)
                medians.append([kind, size, measure.percentile(lat_us, 0.5)])
        blocks += 1
print(f"{blocks} blocks: the bands below are bands of {1 - 2 * 0.5**blocks:.0%}.")

# %%
# %wait bob
sweep = {}
for kind, name in NAMES.items():
    sweep[name] = {}
    for size in lab.alice.get("sizes"):
        each = sorted(us for k, s, us in lab.alice.get("medians") if (k, s) == (kind, size))
        sweep[name][size] = (each[(len(each) - 1) // 2], each[0], each[-1])
view.sweep(sweep, label="half round trip (READ: whole), median", lab=lab)

# %% [markdown]
# **What happened.** Look at shapes. If your bands are narrow enough, all four lines are flat at first
# and rise later: a message costs something before its first byte, and that share does not care about
# size. Up to how many bytes would you pack into one message rather than two? At the right, the cost
# of each byte decides: copies, and packets of at most 4096 bytes.
#
# And compare Python with C at 64 bytes, above. What lies between them is not the network. It is the
# two programs: the loop in Python, and how each of them waits. (C slower than Python? Then its
# polling takes the processor that the device needs.) That is part of every figure in this picture.
# Had you measured in Python only, you would not know how much of your result is the network and how
# much is your program.

# %% [markdown]
# ### Task 5: what does the data support? (4 points)
#
# Judge each statement by *your* data and by nothing else: `"yes"`, `"no"`, or `"cannot tell"` when
# this data says nothing about it. `sweep[name][size]` is (median, low, high) in µs; `calls`,
# `switches`, `in_python` and `in_c` are as printed above.
#
# | | statement |
# |:--|:--|
# | S1 | At 64 bytes TCP's median was smaller than RDMA SEND's, and their bands do not overlap. |
# | S2 | For each of the four, 65,536 bytes took less than 1,024 times as long as 64 bytes. |
# | S3 | RDMA network cards are slower than TCP. |
# | S4 | To send a message, alice entered the kernel once, with SEND as with TCP (waiting not counted). |
# | S5 | Bob's program slept less often while alice read his memory than while he answered over TCP. |
# | S6 | A program on an RDMA card needs one system call for each message. |
#
# <details><summary>Hint 1</summary>
#
# Whose data is it? The device in your measurements is a driver in the kernel.
# </details>
# <details><summary>Hint 2</summary>
#
# Bands of A and B do not overlap, with A the smaller, if A's upper end is below B's lower end.
# </details>
# <details><summary>Hint 3</summary>
#
# S3 and S6 speak of cards. No card was measured.
# </details>

# %% task="conclusion"
answers = dict.fromkeys(["S1", "S2", "S3", "S4", "S5", "S6"], "")
### BEGIN SOLUTION
tcp, send_ = sweep["TCP"][64], sweep["RDMA SEND"][64]
answers["S1"] = "yes" if tcp[2] < send_[1] else "no"
slow = [line[65536][0] / line[64][0] for line in sweep.values()]
answers["S2"] = "yes" if max(slow) < 1024 else "no"
answers["S3"] = answers["S6"] = "cannot tell"
answers["S4"] = "yes"  # one sendto, one write: see `calls`
answers["S5"] = "yes" if switches["read"] < switches["tcp"] else "no"
### END SOLUTION

# %% check="conclusion-limits" points=2
about_cards = [answers.get("S3"), answers.get("S6")]
print(f"S3 and S6 speak of RDMA cards. You said {about_cards[0]!r} and {about_cards[1]!r}.")
assert about_cards != ["", ""], "You have judged neither S3 nor S6 yet."
assert about_cards[0] not in ("yes", "no"), (
    "S3: which measurement above was made with an RDMA card?"
)
assert about_cards[1] not in ("yes", "no"), "S6: which program above ran on an RDMA card?"
assert set(about_cards) == {"cannot tell"}, "Say yes, no or cannot tell."

# %% check="conclusion-data" points=2
(_, _, tcp_high), (_, send_low, _) = sweep["TCP"][64], sweep["RDMA SEND"][64]
truth = {
    "S1": tcp_high < send_low,
    "S2": all(line[65536][0] < 1024 * line[64][0] for line in sweep.values()),
    "S4": calls["send"].get("write") == 1 and calls["tcp"].get("sendto") == 1,
    "S5": switches["read"] < switches["tcp"],
}
said = {name: answers.get(name) for name in truth}
print(f"I held S1, S2, S4 and S5 against your data. You said {said}.")
assert any(said.values()), "S1, S2, S4 and S5 are still without an answer."
wrong = [name for name in truth if said[name] != ("yes" if truth[name] else "no")]
assert not wrong, f"Look again at {wrong[0]}: which of your figures says so, and what does it say?"

# %% [markdown]
# ## On hardware
#
# What have others measured? The kit keeps a table of published figures, each with its source, the
# conditions and the year (`labs/data/hardware.csv`; its README tells how it is kept). The picture
# puts yours (filled) beside them, each as the range from the smallest to the largest.

# %%
import csv
import pathlib

table = pathlib.Path("data/hardware.csv")
published = list(csv.DictReader(table.read_text().splitlines())) if table.exists() else []
print(
    f"{len(published)} published figures" if published else f"{table} is not beside this notebook."
)
spans = {}  # transport -> published latencies of messages of up to 1500 bytes, in us
for row in published:
    if row["metric"] == "latency" and int(row["size_bytes"] or 0) <= 1500:
        spans.setdefault(f"{row['transport']}, published", []).append(float(row["value"]))

# %%
mine = {f"{name}, 64 B, here": (line[64][1], line[64][2]) for name, line in sweep.items()}
others = {name: (min(values), max(values)) for name, values in spans.items()}
title, label = "Yours beside published figures", "one message (the table tells what was timed)"
view.ranges(mine | others, own=list(mine), title=title, label=label, lab=lab)

# %%
for row in published:
    print(f"{row['transport']}, {row['operation']}, {row['size_bytes'] or '?'} B, {row['metric']}:")
    print(f"    {float(row['value']):,g} {row['unit']} ({row['what']})")
    print(f"    {row['conditions']}. {row['source']}, {row['year']} ({row['kind']})")

# %% [markdown]
# Why do they differ from yours, and from each other?
#
# - **The device.** On a card, hardware builds and checks the packets. Here the kernel does, on a
#   processor that is perhaps emulated, and both ends share it. In the table, half a round trip lies
#   between about 1 and 6 µs with RDMA cards and between 10 and 20 µs with kernel TCP, on machines of
#   very different years. Your data cannot show that, and does not contradict it.
# - **What was timed.** Half a round trip or a whole READ, median or "sub", tuned machines or
#   whatever stood there: compare the columns before the numbers. One chip is given 0.6 µs in one
#   text and 0.8 µs in another; neither says how that was measured.
# - **No call, no copy.** A card's doorbell is a write into its register, where Soft-RoCE needs the
#   `write` system call that you counted (Kalia et al., *Design Guidelines for High Performance RDMA
#   Systems*, USENIX ATC 2016, counts what crosses PCIe instead).
# - **The processor.** At 100 Gb/s one core cannot keep up with kernel TCP, and the bottleneck is the
#   copy to the receiving program (Cai et al., SIGCOMM 2021). With RDMA the card puts it there.

# %% [markdown]
# ## What this does not show
#
# - How fast RDMA is. Soft-RoCE teaches what RDMA *does*. Its own maintainers call it a platform for
#   development.
# - Distance. Both hosts are in one virtual machine: no cable, no switch, and, when it is busy, no
#   processor either. On a busy machine all figures grow, the polling ones most.
# - Kernel bypass: see section 5. That bob's *program* slept through the READs is true; that his
#   *processor* did is not.
# - Throughput, and many messages under way at once. That is Lab 05's subject.

# %% [markdown]
# ## Food for thought
#
# 1. A service answers in 100 µs at the median, 10 ms at p99. A page needs 100 such answers, asked for
#    at once. How long does the page take, typically?
# 2. `ib_write_lat` polls on memory, `ib_send_lat` on a completion queue. Which of them measures what
#    *your* program would do?
# 3. Your ping-pong must run on a machine where the loop may not poll. What do you change, and which
#    of the figures will change most?
#
# ## Troubleshooting
#
# | symptom | likely cause | do |
# |:--|:--|:--|
# | "Bob does not listen", "run measure.server() there first" | bob's cell with `--bg` did not run, or is over | run it again, just before alice's |
# | the sweep of section 7 did not finish | the machine is too busy | the start cell, then from section 7's last `measure.server` on |
# | bob "is still busy" | his cell waits for alice, 10 to 40 s at most | wait, or `lab.bob.interrupt()` |
# | `TimeoutError: no completion` | the other side has ended or posts nothing | run again from the task's heading |
# | all figures are ten times larger than a minute ago | something else runs on this machine | close it; compare only what was measured in turn |
# | `IBV_WC_RNR_RETRY_EXC_ERR` | an answer found no receive, several times over | post receives before sends |
# | the sum of your samples exceeds the time that passed | whole round trips | halve them |
#
# ## Further reading
#
# - `perftest(1)` and its README, section "Notes on Testing Methodology"; `sockperf(1)`; `tcp(7)`;
#   `strace(1)`.
# - Gil Tene, *How NOT to Measure Latency* (a talk): percentiles, and coordinated omission.
# - Kalia, Kaminsky, Andersen, *Design Guidelines for High Performance RDMA Systems*, USENIX ATC 2016.
# - Guo et al., *RDMA over Commodity Ethernet at Scale*, SIGCOMM 2016: latency in a large network,
#   with other traffic.
#
# **Next lab:** 05, *Throughput, pipelining and CPU cost*: many messages under way at once.

# %% [markdown]
# ## Clean up

# %%
# %%on alice bob
if "ep" in globals():
    ep.close()
