# %% [markdown]
# # Lab 03: Compare one-sided and two-sided operations
#
# Move the same bytes in six ways, and see each time who gives the order, who is told, whose
# program works, what crosses the wire, and when the bytes may be read.
#
# ![Drawing. Two hosts, alice (10.0.0.1) and bob (10.0.0.2). Above, two-sided: alice's program
# posts a send, bob's program posts a receive, the bytes go from device to device, an
# acknowledgement comes back, and both programs get a completion. Below, one-sided: alice's program
# posts an order that names memory here and there; bob's device serves bob's memory, to which alice
# has the key; bob's program does nothing and is told nothing.](images/03_two_sides.svg)
#
# | | |
# |:--|:--|
# | **You will do** | SEND, WRITE, WRITE with immediate, READ and two atomics; read them on the wire; count what they cost the target; build two mailboxes and a counter that loses nothing |
# | **You will learn** | what each operation needs from the other side, what a completion promises and what it does not, and how to choose |
# | **You need** | 90 minutes, 700 MB of free memory, any backend |
# | **Before this** | Lab 01 (memory regions and keys) and Lab 02 (queue pairs), or the same knowledge |
#
# **How to work.** Run the cells from top to bottom. Each section asks for a *prediction* first:
# write it down before you run the experiment.

# %% [markdown]
# ## Start
#
# This starts the hosts, or finds those that run already. You can come back to this cell, or
# restart and run everything, at any time.

# %%
# %load_ext rdmalab
import time

import rdmalab

lab = rdmalab.up()
# %hosts

# %% [markdown]
# ## 1 A connection
#
# Lab 02 brought a queue pair up by hand. From here on, an `Endpoint` does it: it opens the device,
# registers `size` bytes of memory, makes the queues and the queue pair, swaps cards with the other
# host, and moves the queue pair to RTS. It hides nothing: `Endpoint.explain()` prints the calls,
# and `ep.qp`, `ep.mr`, `ep.scq` and `ep.rcq` are the plain pyverbs objects.
#
# `fresh` closes what there was and connects anew. Several sections begin with it, because an
# experiment that fails on purpose leaves a queue pair in ERR.

# %%
# %%on alice bob
import os
import sys
import time

import pyverbs.enums as e
from pyverbs.wr import SGE, RecvWR, SendWR
from rdmalab import here
from rdmalab.verbs import CompletionError, Endpoint

PEER = "bob" if here.name == "alice" else "alice"


# %%
# %%on alice bob
def fresh(**wishes):
    """Close the endpoint that there was; make a new one, and connect it to the other host's."""
    global ep
    if "ep" in globals():
        ep.close()
    ep = Endpoint(**{"size": 16384, "path_mtu": 1024, "psn": 1000, **wishes})
    ep.connect(PEER)


# %% [markdown]
# Two choices make the packets easy to read. The **path MTU** is set to 1024 bytes, so that a
# message of some thousand bytes becomes several packets. And the first packet of each side gets
# the **packet sequence number** (PSN) 1000; real programs draw it at random.
#
# `connect` waits for the other side, so both hosts must be in it at the same time. `%%on alice bob`
# does that for a cell; the following does it for a line of code inside a cell.


# %%
def on_both(code):
    """Run code on alice and bob at the same time."""
    for job in [host.start(code) for host in (lab.alice, lab.bob)]:
        job.result()


on_both("fresh(); print(here.name, 'queue pair', ep.qp.qp_num, ep.state)")

# %% [markdown]
# And we let the programs keep a **diary** of what they do: which orders they give, and which
# completions they get. Later we lay it beside the packets. Hosts and capture use the same clock.

# %%
# %%on alice bob
diary = []


def note(text):
    """What this program does now."""
    diary.append([here.name, text, time.time()])


def completion():
    """Wait for the next completion, note it, and return it."""
    (done,) = ep.wait(1)
    note(f"completion: {done.status}")
    return done


# %%
def story():
    """The diaries of both hosts, for the picture; they begin anew."""
    entries = lab.alice.get("diary") + lab.bob.get("diary")
    on_both("diary.clear()")
    return entries


# %% [markdown]
# ## 2 Two-sided: SEND
#
# Bob posts a receive: an order that says where *the next* message shall go. Then alice posts a
# SEND: an order that says where *her* bytes lie. She does not know where they will go.
#
# **Predict.** Alice sends 5000 bytes. How many packets will leave her, and how many
# acknowledgements will bob's device return?


# %%
# %%on alice bob
def receive(length):
    """Order: put the next message at the start of the buffer."""
    note(f"post_recv: up to {length} bytes")
    place = SGE(ep.mr.buf, length, ep.mr.lkey)
    ep.qp.post_recv(RecvWR(num_sge=1, sg=[place]))


def send(length):
    """Order: send the first bytes of the buffer."""
    note(f"post_send: SEND, {length} bytes")
    piece = SGE(ep.mr.buf, length, ep.mr.lkey)
    ep.qp.post_send(SendWR(opcode=e.IBV_WR_SEND, num_sge=1, sg=[piece]))


# %%
with lab.capture() as wire:
    lab.bob.run("receive(8192)")
    lab.alice.run("send(5000); print('alice:', completion().status)")
    lab.bob.run("done = completion(); print('bob:', done.status, done.byte_len, 'bytes')")
wire.ladder(calls=story(), title="SEND of 5000 bytes")

# %% [markdown]
# **What happened.** Read the ladder from top to bottom. (The long silences are the notebook on its
# way from one cell to the next. Bob's completion was ready when the last packet was in; his program
# looked later.)
#
# - Bob's receive comes before everything else.
# - The device cut the message into packets of one path MTU: *first*, three times *middle*, and
#   *last* with the remaining 904 bytes. Each has its own PSN, from 1000 to 1004.
# - Only the last packet asks for an acknowledgement (*ack?*; other devices may ask more often), so
#   one ACK, for PSN 1004, answers all five. (*again*, if you see it: alice's device waited too long
#   for an answer, and repeated itself.) That ACK is alice's completion. The *MSN* in it, message
#   sequence number, counts the messages that bob's queue pair has finished.
# - Bob's device put each packet into bob's memory as it came; bob got *one* completion, with the
#   length, when the last one was in. A receive takes one whole message, be it short or long.
# - No packet carries an address. SEND leaves it to the receiver where the bytes go.

# %% [markdown]
# ## 3 The receive must come first
#
# A device holds no message in store. What if bob posts no receive?
#
# His device answers with a NAK: **receiver not ready** (RNR). It says how long alice's device shall
# wait before it sends again; bob's queue pair has that time as `min_rnr_timer`. How often alice's
# device tries again is alice's `rnr_retry`.
#
# **Predict.** Bob posts nothing. How many NAKs will alice's device get with `rnr_retry` 0, 1 and 3?
# And what will bob's program notice?

# %%
# %%on alice bob
import json
import subprocess


def counter(name):
    """One of the counters that this host's device keeps."""
    link = f"{here.device}/{here.port}"
    shown = subprocess.check_output(["rdma", "-j", "statistic", "show", "link", link])
    return json.loads(shown)[0][name]


# %%
# %%on alice
def send_unexpected():
    """Send although nobody waits for it; say how the order ended, and count the NAKs."""
    before = counter("rcvd_rnr_err")
    try:
        ep.post_send(0, 64)
        ep.wait(1)
    except CompletionError as error:
        naks = counter("rcvd_rnr_err") - before
        print(f"rnr_retry {ep.rnr_retry}: NAKs {naks}, then {error.cause.status}; {ep.state}")


# %%
for retries in (0, 1, 3):
    on_both(f"fresh(rnr_retry={retries})")
    lab.alice.run("send_unexpected()")
lab.bob.run("print('bob:', ep.state, 'with', ep.rcq.poll()[0], 'completions')")

# %% [markdown]
# **What happened.** One attempt and `rnr_retry` repetitions, each answered by a NAK; then alice's
# order fails with `IBV_WC_RNR_RETRY_EXC_ERR` and her queue pair is in ERR. Bob's program is told
# nothing, and his queue pair is as good as before. (`rnr_retry` 7 means *for ever*: the program
# then hangs instead of failing.)
#
# More often the receive comes a little *late*. How much time that costs is up to the timer. It is
# five bits wide and an index into a table of the specification: 1 is 0.01 ms, 12 is 0.64 ms, 31 is
# 491.52 ms. 0, which many programs leave there, is not "no wait" but the longest: 655.36 ms.
#
# **Predict.** Bob's timer is 0, alice's 12. Bob posts his receive 0.2 s after alice has sent. When
# does the message arrive: after 0.2 s, or later? Which of the two timers counts?

# %%
jobs = lab.alice.start("fresh(min_rnr_timer=12)"), lab.bob.start("fresh(min_rnr_timer=0)")
for job in jobs:
    job.result()
with lab.capture() as wire:
    lab.alice.run("send(64)")
    time.sleep(0.2)
    lab.bob.run("receive(64)")  # a little late
    lab.alice.run("print('alice:', completion().status)")
wire.ladder(calls=story(), title="a receive that comes late")

# %%
naks = [p for p in wire.packets if p.syndrome == "RNR NAK"]
sends = [p for p in wire.packets if p.opcode == "SEND_ONLY"]
waited_ms = (sends[-1].time_s - naks[-1].time_s) * 1e3
print(f"A NAK asked to wait {naks[-1].rnr_timer_ms} ms. Alice's device waited {waited_ms:.0f} ms.")

# %% [markdown]
# **What happened.** *Bob's* timer counts: it travels to alice inside the NAK. The receive was there
# long before, but alice's device did not know, and waited out the time that it had been given. (On
# a busy machine, bob's cell may come so late that there are two NAKs, or more.) A message that is
# "sometimes 0.7 s late although nothing is lost" is nearly always this one: look at the counter
# `rcvd_rnr_err`.
#
# The cure is an order of steps, not a better timer: **post the next receive before you do what
# lets the peer send.**

# %% [markdown]
# ## 4 One-sided: WRITE and READ
#
# A one-sided order names both ends: a place in alice's memory, and a place in bob's, with the key
# to it. `ep.peer` is bob's card, which came over with `connect`. A WRITE and a READ differ only in
# their opcode, so one function can give both.


# %%
# %%on alice
def give(opcode, length, there, **more):
    """Order: move bytes between the start of alice's buffer and the byte `there` of bob's."""
    note(f"post_send: {opcode.name.removeprefix('IBV_WR_RDMA_')}, {length} bytes")
    piece = SGE(ep.mr.buf, length, ep.mr.lkey)
    order = SendWR(opcode=opcode, num_sge=1, sg=[piece], **more)
    order.set_wr_rdma(ep.peer.rkey, ep.peer.address + there)
    ep.qp.post_send(order)


def write_read_write():
    """Three orders, one after the other."""
    for opcode, length in ((WRITE, 3000), (READ, 3000), (WRITE, 8)):
        give(opcode, length, there=8192 if opcode == WRITE else 0)
        completion()


# %% [markdown]
# **Predict.** Alice writes 3000 bytes, reads 3000 bytes, and writes 8. How many packets leave alice
# for each, how many bob? Who tells alice that a READ is done?

# %%
# %%on alice bob
WRITE, READ = e.ibv_wr_opcode.IBV_WR_RDMA_WRITE, e.ibv_wr_opcode.IBV_WR_RDMA_READ
fresh()
ep.buffer[0:3000] = here.name[:1].encode() * 3000  # alice's bytes are a, bob's are b

# %%
with lab.capture() as wire:
    lab.alice.run("write_read_write()")
wire.ladder(calls=story(), title="WRITE, READ, and a short WRITE")

# %%
# %%on alice bob
place = 0 if here.name == "alice" else 8200
told = ep.scq.poll()[0] + ep.rcq.poll()[0]
print(f"{here.name} has {ep.buffer[place : place + 8]} at {place}; further completions: {told}")

# %% [markdown]
# **What happened.**
#
# - The *first* packet of a WRITE carries what SEND does not have: address, key and length (the
#   *RETH*, RDMA extended transport header). The others just continue.
# - A READ is *one* packet out, with a RETH, and the data comes back as *responses* of one path MTU
#   each. They are the acknowledgement, too. Bob's device asks nobody; alice has the key, and bob's
#   memory region gives the right.
# - Look at the PSNs. The request has 1003, and the responses have 1003, 1004 and 1005: a READ uses
#   up a number for each packet that will *return*. So alice's next request, the short WRITE, is 1006.
#   The gap in her own numbers is no loss.
# - Bob's program got no completion for any of it, and wrote nothing into its diary.

# %% [markdown]
# ## 5 In between: WRITE with immediate
#
# What if bob *should* be told? Then alice gives four bytes along, the **immediate** data. They go
# not into bob's memory but into a completion, and for that bob must have posted a receive. The
# data goes where alice says; the receive's own place stays untouched.
#
# **Predict.** Which side posts what? Where do the 3000 bytes go, where the 77? What if there is no
# receive?

# %%
# %%on alice bob
fresh()
ep.buffer[0:3000] = here.name[:1].encode() * 3000


# %%
# %%on alice
def write_with_immediate(number):
    """In `SendWR`, the immediate is in network byte order; the endpoint turns it for us."""
    note(f"post_send: WRITE WITH IMM, {number}")
    ep.post_write(0, 3000, 8192, imm=number)
    completion()


# %%
# %%on bob
def hear():
    """Wait for a completion, and show what it says and where the bytes are."""
    done = completion()
    print("completion:", done.status, done.byte_len, "bytes, immediate", done.imm)
    print("where the receive points:", ep.buffer[0:4], " where alice says:", ep.buffer[8192:8196])


# %%
with lab.capture() as wire:
    lab.bob.run("receive(64)")
    lab.alice.run("write_with_immediate(77)")
    lab.bob.run("hear()")
wire.ladder(calls=story(), title="WRITE with immediate")

# %% [markdown]
# **What happened.** The last packet is a *last with immediate*; it takes a receive from bob's queue
# and makes the completion. Only the receive's existence counted: its bytes were not touched. Without
# one, the answer is RNR, as for a SEND. WRITE with immediate is one-sided in *where the bytes go*
# and two-sided in *who must take part*.

# %% [markdown]
# ## 6 Atomics
#
# Two operations change eight bytes of bob's memory and return what they were before, in one step
# that no other atomic on bob's device can come between:
#
# - **fetch-and-add** adds a number;
# - **compare-and-swap** puts a new value there *if* the old one is what alice expects, and changes
#   nothing otherwise.
#
# The eight bytes must lie at an address that is a multiple of eight, and are a number in the
# byte order of the host. The old value comes into alice's buffer.


# %%
# %%on alice
def change(opcode, there, *operands):
    """Order: change the number at bob's byte `there`; what it was comes to alice's byte 0."""
    note(f"post_send: {opcode.name.removeprefix('IBV_WR_ATOMIC_')} {operands}")
    piece = SGE(ep.mr.buf, 8, ep.mr.lkey)
    order = SendWR(opcode=opcode, num_sge=1, sg=[piece])
    order.set_wr_atomic(ep.peer.rkey, ep.peer.address + there, *operands)
    ep.qp.post_send(order)
    completion()
    return int.from_bytes(ep.buffer[0:8], sys.byteorder)


# %% [markdown]
# **Predict.** Bob's number is 37. Alice adds 5; then swaps 42 for 7; then, once more, 42 for 9.
# What do the three orders return, and what does bob have at the end?

# %%
# %%on alice bob
ADD, SWAP = e.ibv_wr_opcode.IBV_WR_ATOMIC_FETCH_AND_ADD, e.ibv_wr_opcode.IBV_WR_ATOMIC_CMP_AND_SWP
fresh()
ep.buffer[64:72] = (37).to_bytes(8, sys.byteorder)

# %%
with lab.capture() as wire:
    lab.alice.run(
        "returned = [change(ADD, 64, 5), change(SWAP, 64, 42, 7), change(SWAP, 64, 42, 9)]"
    )
lab.bob.run("number = int.from_bytes(ep.buffer[64:72], sys.byteorder)")
print("returned:", lab.alice.get("returned"), " bob has:", lab.bob.get("number"))
wire.ladder(calls=story(), title="fetch-and-add, and two compare-and-swaps")

# %% [markdown]
# **What happened.** Each is one packet out and one *atomic acknowledgement* back, which carries the
# old value. The third order did not *fail*: its completion says success, and only the value that
# came back, 7 instead of 42, tells alice that she was too late. Who forgets to compare has a bug
# that no completion will show.
#
# Bob's device does these orders one after the other. Among *whom* they are atomic, it says itself:

# %%
# %%on bob
# !ibv_devinfo -v -d {here.device} | grep atomic_cap

# %% [markdown]
# `ATOMIC_HCA`: among the operations that go through this *device* (*HCA* is the device, see Lab 00).
# `ATOMIC_GLOB` would include the host's own processor. So when bob's program itself does
# `counter += 1` at the wrong moment, an addition can get lost. Task 4 is about that.

# %% [markdown]
# ## 7 All six side by side
#
# Bob posts one receive, and alice gives one order of each kind. Then we look who was told, whether
# the receive was used up, and whose bytes have changed.
#
# From here on the endpoint gives the orders, since you have seen what they are made of:
#
# | call | order |
# |:--|:--|
# | `ep.post_recv(offset, length)` | put the next message at byte `offset` of my buffer |
# | `ep.post_send(offset, length)` | send these bytes of my buffer |
# | `ep.post_write(offset, length, remote_offset, imm=None)` | write them to the peer's byte `remote_offset` |
# | `ep.post_read(offset, length, remote_offset)` | the other way round |
# | `ep.post_fetch_add(offset, remote_offset, add)` | add; the old value comes to `offset` |
# | `ep.post_compare_swap(offset, remote_offset, expect, swap)` | swap if it is `expect`; the old value comes to `offset` |
# | `ep.wait(n)` | wait for `n` completions and return them |
#
# `ep.send`, `ep.write`, `ep.read`, `ep.fetch_add` and `ep.compare_swap` post and wait in one call.
#
# **Predict.** Fill in the table first: for each kind, completions at alice, completions at bob.

# %%
# %%on alice
ORDERS = {
    "SEND": lambda: ep.post_send(0, 8),
    "WRITE": lambda: ep.post_write(0, 8, 64),
    "WRITE with immediate": lambda: ep.post_write(0, 8, 64, imm=7),
    "READ": lambda: ep.post_read(0, 8, 64),
    "fetch-and-add": lambda: ep.post_fetch_add(0, 64, 1),
    "compare-and-swap": lambda: ep.post_compare_swap(0, 64, 0, 1),
}
KINDS = list(ORDERS)


# %%
# %%on alice bob
def start(receives):
    """A fresh pair with bytes to tell apart; bob posts so many receives at byte 128."""
    fresh(depth=receives + 8)
    ep.buffer[0:8] = b"alice..."
    for _ in range(receives if here.name == "bob" else 0):
        ep.post_recv(128, 64)


def look():
    """What has come of it on this host."""
    told = len(ep.rcq.poll(8)[1] or []) if here.name == "bob" else 0
    places = {"place of the receive": ep.buffer[128:136], "place alice named": ep.buffer[64:72]}
    changed = [name for name, found in places.items() if found != bytes(8)]
    return {"told": told, "changed": changed, "back": ep.buffer[0:8] != b"alice..."}


# %%
facts = {}
for kind in lab.alice.get("KINDS"):
    on_both("start(receives=1)")
    lab.alice.run(f"ORDERS[{kind!r}](); mine = len(ep.wait(1))")
    on_both("seen = look()")
    bob, alice = lab.bob.get("seen"), lab.alice.get("seen")
    facts[kind] = {"alice_told": lab.alice.get("mine"), "bob_told": bob["told"]}
    facts[kind] |= {"changed": bob["changed"], "back": alice["back"]}
    where = " and ".join(bob["changed"]) or "nothing"
    print(f"{kind:21} completions: alice {facts[kind]['alice_told']}, bob {bob['told']};", end=" ")
    print(f"changed at bob: {where}; alice got bytes: {'yes' if alice['back'] else 'no'}")

# %% [markdown]
# And what if somebody else was quicker? Both atomics once more; each time, the number is 5 already,
# where alice still believes in 0.

# %%
for kind in ("fetch-and-add", "compare-and-swap"):
    on_both("start(receives=1)")
    lab.bob.run("ep.buffer[64:72] = (5).to_bytes(8, sys.byteorder)")  # somebody was quicker
    lab.alice.run(f"ORDERS[{kind!r}](); ep.wait(1)")
    lab.bob.run("number = int.from_bytes(ep.buffer[64:72], sys.byteorder)")
    facts[kind]["changes_always"] = lab.bob.get("number") != 5
    print(f"{kind}: the number was 5, and is {lab.bob.get('number')} now")

# %% [markdown]
# **What happened.** Alice, who gave the order, is told every time. Bob is told exactly when one of
# his receives was used up. And there are two ways for bytes to find their place: where *bob's
# receive* points, or where *alice* says.
#
# Of the two atomics, fetch-and-add does its work whatever stands there. Compare-and-swap leaves
# alone what somebody else has changed: then alice was too late, and must look and try again.
#
# | | bytes go | who names the place at bob | needs a receive at bob | bob is told |
# |:--|:--|:--|:--|:--|
# | SEND | alice → bob | bob | yes | yes |
# | WRITE with immediate | alice → bob | alice | yes | yes |
# | WRITE | alice → bob | alice | no | no |
# | READ | bob → alice | alice | no | no |
# | atomics | both ways, 8 bytes | alice | no | no |

# %% [markdown]
# ## 8 Whose program works?
#
# Now 2000 operations of each kind. Bob's program is the same every time: it posts the receives that
# the kind needs, and one more; then it *sleeps* until the device wakes it for a completion, counts
# what has come, and sleeps again. Alice gives ten orders at a time; her very last one is a SEND that
# ends it.
#
# Linux keeps the account of each thread: CPU time; *context switches*, the times that it was put to
# sleep or made room for another; and `read()` and `write()` calls.
#
# **Predict.** For which kinds does bob's program use much CPU time? How often is it woken?

# %%
# %%on alice bob
import ctypes
import resource

ctypes.CDLL(None).prctl(4, 1)  # PR_SET_DUMPABLE: this process may read its own /proc/.../io


def account():
    """What this thread has used so far: ms of CPU time, switches, read() and write() calls."""
    used = resource.getrusage(resource.RUSAGE_THREAD)
    with open("/proc/thread-self/io") as file:
        calls = dict(line.split(": ") for line in file.read().splitlines())
    cpu_ms = (used.ru_utime + used.ru_stime) * 1e3
    return cpu_ms, used.ru_nvcsw + used.ru_nivcsw, int(calls["syscr"]) + int(calls["syscw"])


# %%
# %%on alice bob
def since(before):
    """The difference to an earlier account."""
    return [now - then for now, then in zip(account(), before, strict=True)]


# %%
# %%on bob
def prepare(messages):
    """Post as many receives. They share one place: this program counts, and reads nothing."""
    global used
    before = account()
    for _ in range(messages):
        ep.post_recv(128, 64)
    used = since(before)


# %%
# %%on bob
def serve(messages):
    """Sleep, wake up, count: until as many messages have come."""
    global used
    before = account()
    while messages > 0:
        messages -= len(ep.wait_event(timeout_s=40, queue="recv"))
    used = [a + b for a, b in zip(used, since(before), strict=True)]


# %%
# %%on alice
def work(kind, count):
    """Give `count` orders of a kind, ten at a time, and then the SEND that ends it."""
    global used
    before = account()
    for _ in range(count // 10):
        for _ in range(10):
            ORDERS[kind]()
        ep.wait(10, timeout_s=20)
    used = since(before)
    ep.send(b"over")


# %%
COUNT, costs = 2000, {}
lab.alice.run("refused = counter('rcvd_rnr_err')")
for kind in lab.alice.get("KINDS"):
    messages = 1 + COUNT * facts[kind]["bob_told"]
    on_both(f"fresh(depth={messages + 16})")
    lab.bob.run(f"prepare({messages})")
    job = lab.bob.start(f"serve({messages})")
    lab.alice.run(f"work({kind!r}, {COUNT})", timeout_s=120)
    job.result()
    costs[kind] = {"alice": lab.alice.get("used"), "bob": lab.bob.get("used")}
lab.alice.run("print('receiver not ready:', counter('rcvd_rnr_err') - refused, 'times')")

# %%
print(f"{COUNT} of each{'':14}alice: CPU   calls      bob: CPU  switches  calls")
for kind, used in costs.items():
    alice, bob = used["alice"], used["bob"]
    print(f"{kind:21} {alice[0]:9.0f} ms {alice[2]:7} {bob[0]:10.1f} ms {bob[1]:9} {bob[2]:6}")

# %%
from rdmalab import view

view.bars(
    {kind: used["bob"][0] for kind, used in costs.items()},
    unit="ms",
    title=f"CPU time of bob's program for {COUNT} operations",
    lab=lab,
)

# %% [markdown]
# **What happened.** For WRITE, READ and the atomics, bob's program was woken once, for the message
# that ended it. Of the 2000 operations it knows nothing. For SEND it posted 2000 receives, was woken
# hundreds of times (several completions may share one wake-up), and took each completion; and
# WRITE with immediate, whose bytes go where alice says, costs bob *about as much*. What costs is not
# the bytes. It is being told. (And of 4000 messages that needed a receive none was refused: all
# receives had been posted first.)
#
# Do not read the times as figures for RDMA: a Python program in an emulated machine is slow, and bob
# does nothing *with* what he is told. The ratio is the lesson. And note what alice's column says: one
# `write()` call for each order. Soft-RoCE's "doorbell" is a system call; a card's is not.

# %% [markdown]
# ## 9 Whose buffer is it?
#
# `post_send` returns at once. Has the device taken the bytes by then?
#
# **Predict.** Alice posts a SEND of "pay bob   10", and then, before it is completed, writes
# "pay bob 1000" into the same buffer. Bob posts his receive a little late. What will he read?


# %%
# %%on alice
def send_and_change():
    """Post a SEND, and write to its buffer before it is completed."""
    ep.buffer[0:12] = b"pay bob   10"
    ep.post_send(0, 12)
    time.sleep(0.05)  # by now it has been on the wire, and was refused: bob has no receive
    ep.buffer[0:12] = b"pay bob 1000"


# %%
# %%on bob
def receive_late():
    """Post the receive for what was sent before, and read."""
    ep.post_recv(0, 64)
    ep.wait(1)
    print("bob reads:", ep.buffer[0:12])


# %%
jobs = lab.alice.start("fresh()"), lab.bob.start("fresh(min_rnr_timer=31)")  # 31: 491.52 ms
for job in jobs:
    job.result()
lab.alice.run("send_and_change()")
lab.bob.run("receive_late()")

# %% [markdown]
# **What happened.** The device had sent the message already, and sent it again, and took the bytes
# *again* from alice's memory. That is what zero-copy means: between the post and the completion
# there is no other copy. Until the completion **the buffer belongs to the device**. This holds for
# every kind of order, without a late receive too:

# %%
# %%on alice bob
fresh(max_inline=64)


# %%
# %%on alice
def overwritten(inline):
    """Of 100 WRITEs, how many carried what was put into the buffer after the post?"""
    new = 0
    for _ in range(100):
        ep.buffer[0:12] = b"pay bob   10"
        ep.post_write(0, 12, 0, inline=inline)
        ep.buffer[0:12] = b"pay bob 1000"
        ep.wait(1)
        new += ep.read(0, 12) == b"pay bob 1000"
    return new


print(f"overwritten at once: {overwritten(inline=False)} of 100 WRITEs carried the new bytes")
print(f"the same, inline: {overwritten(inline=True)} of 100")

# %% [markdown]
# **Inline** orders (`IBV_SEND_INLINE`) are the exception: there `post_send` copies the bytes into
# the order itself, so the buffer is free when it returns. Devices allow it for small messages only.
#
# The same ownership holds on the receiving side: from `post_recv` to its completion the place is the
# device's, and what stands in it is nobody's promise.

# %% [markdown]
# ## 10 When may bob look?
#
# A WRITE tells bob nothing. Yet his program may look into the memory at any time. To see what it can
# find there, we make the wire so slow that a packet takes 2 ms, and alice writes records of 8192
# bytes, in eight packets. All bytes of a record are equal, so a copy with two different bytes is
# **torn**: part old, part new. Behind each record alice writes a flag, as a second message.
#
# ![Time line. The eight packets of a WRITE fill bob's memory step by step; who copies meanwhile gets
# old and new mixed. Three signals follow. The last byte of the same WRITE has changed: a habit of
# many cards, not promised. The flag of a second WRITE has changed: the order of two messages is kept,
# unless the region was registered with relaxed ordering. Bob gets a completion, for a SEND or a
# WRITE with immediate: promised, all is there.](images/03_when_to_look.svg)
#
# Bob goes by one of four signals: the first byte of the record has changed; its last byte has; the
# flag has; he got a completion.
#
# **Predict.** With which of the four will his copies be torn?

# %%
# %%on alice bob
RECORD, FLAG, GO = 8192, 8192, 9000  # a record's size; where the flag and bob's request stand


def until(place, value, seconds=10):
    """Look at a byte again and again until it has this value; let others run meanwhile."""
    end = time.monotonic() + seconds
    while ep.buffer[place : place + 1] != value:
        if time.monotonic() > end:
            raise TimeoutError(f"{here.name} waited {seconds} s for byte {place}")
        os.sched_yield()


# %%
# %%on alice
def publish(versions):
    """Write a record, then a flag with an immediate, each time that bob asks for it."""
    for version in range(1, versions + 1):
        new = bytes([version])
        until(GO, new)
        ep.buffer[0 : RECORD + 1] = new * (RECORD + 1)
        ep.post_write(0, RECORD, 0)
        ep.post_write(FLAG, 1, FLAG, imm=version)
        ep.wait(2)


# %%
# %%on bob
def torn_copies(place, versions):
    """Copy each record when the byte at `place` is new, or at the completion if it is None."""
    torn = 0
    for new in (bytes([version]) for version in range(1, versions + 1)):
        ep.post_recv(12000, 8)
        ep.write(new, GO)  # ask alice for this version
        if place is None:
            ep.wait(1, queue="recv")
        else:
            until(place, new)
        torn += ep.buffer[0:RECORD] != new * RECORD
        if place is not None:
            ep.wait(1, queue="recv")
    print(f"{torn:2} of {versions} copies are torn")


# %%
signals = {"first byte": 0, "last byte": 8191, "flag of a second WRITE": 8192, "completion": None}
with lab.fault("alice", rate="4mbit"):
    for signal, place in signals.items():
        on_both("fresh()")
        job = lab.bob.start(f"torn_copies({place}, 5)")
        lab.alice.run("publish(5)")
        print(f"bob goes by: {signal:22}", end="  ")
        job.result()

# %% [markdown]
# **What happened.** Who looks while the bytes arrive gets a torn record, and no error tells him. The
# other three signals gave whole records *here*. That is not the same as a promise:
#
# - **Completion**: promised. When bob has the completion of a SEND or of a WRITE with immediate, the
#   bytes of that message and of all earlier ones on this connection are in his memory.
# - **Flag in a second WRITE**: two WRITEs of one queue pair are carried out in order, so the flag
#   comes after the record. Many programs build on that. It breaks when the region was registered with
#   `IBV_ACCESS_RELAXED_ORDERING`, or when record and flag go through *different* queue pairs.
# - **Last byte of the same WRITE**: not promised. In which order the bytes of one message reach
#   memory is left open, though many cards go upwards (`ibv_reg_mr(3)`, *Ordering semantics*). One can
#   ask the device (`ibv_query_qp_data_in_order(3)`):

# %%
# %%on bob
print("data of a WRITE in order:", bool(ep.qp.query_data_in_order(e.IBV_WR_RDMA_WRITE)))

# %% [markdown]
# This device does not promise it, although it did so five times of five. A program that relies on what
# it has seen works until it meets another card, another path, or another driver.
#
# And **alice's** completion? It tells her that bob's device has taken the message, and that her
# buffer is hers again. It tells *bob* nothing. A protocol in which bob "will surely have looked by
# then" is one without synchronization.

# %% [markdown]
# ### Task 1: a mailbox with a flag (4 points)
#
# Alice shall deliver messages into bob's memory, by RDMA WRITE only. Bob's side is ready:
# `collect()` waits until the eight bytes at `FLAG` are not zero, takes them as the length of the
# message, copies so many bytes from `TEXT` on, and sets the flag back to zero.
#
# Complete `deliver(message)` on alice: bring the message to bob's byte `TEXT` and its length to
# bob's byte `FLAG`, as a number of eight bytes in the hosts' byte order. Bob may look at any moment
# and must never get half a message. When `deliver` returns, both orders are completed, and alice's
# buffer is free.
#
# Each check makes both endpoints afresh, so that nothing of an earlier answer counts.
#
# <details><summary>Hint 1</summary>
#
# Two orders. In section 10, `publish` does something very much like it. Which of the two must be
# carried out last?
# </details>
# <details><summary>Hint 2</summary>
#
# `number.to_bytes(8, sys.byteorder)` makes the eight bytes. Both pieces must lie in `ep.buffer` at
# places that do not overlap; `ep.post_write(offset, length, remote_offset)` gives the order.
# </details>
# <details><summary>Hint 3</summary>
#
# `ep.buffer[0:n] = message` and `ep.buffer[FLAG:FLAG + 8] = ...`; then
# `ep.post_write(0, n, TEXT)`, `ep.post_write(FLAG, 8, FLAG)`, and `ep.wait(2)`.
# </details>

# %%
# %%on alice bob
fresh()
TEXT, FLAG = 0, 8192


# %%
# %%on bob
def collect(seconds=2):
    """Wait for the flag, copy the message, clear the flag; None if nothing came in time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        length = int.from_bytes(ep.buffer[FLAG : FLAG + 8], sys.byteorder)
        if length:
            message = ep.buffer[TEXT : TEXT + min(length, FLAG)]
            ep.buffer[FLAG : FLAG + 8] = bytes(8)
            return message
        os.sched_yield()
    return None


# %% task="flag"
# %%on alice
def deliver(message):
    """WRITE `message` to bob's TEXT and its length, 8 bytes, to bob's FLAG; return when done."""
    ### BEGIN SOLUTION
    n = len(message)
    ep.buffer[0:n] = message
    ep.buffer[FLAG : FLAG + 8] = n.to_bytes(8, sys.byteorder)
    ep.post_write(0, n, TEXT)
    ep.post_write(FLAG, 8, FLAG)
    ep.wait(2)
    ### END SOLUTION


# %% check="flag-text" points=2
on_both("fresh()")
found = []
for text in (b"first", b"and a longer one" * 250, b"third"):
    lab.alice.run(f"deliver({text!r})")
    lab.bob.run("message = collect()")
    found.append(lab.bob.get("message"))
lengths = [message if message is None else len(message) for message in found]
print(f"Alice delivered messages of 5, 4000 and 5 bytes; bob collected {lengths} bytes.")
assert found[0] is not None, "Bob's flag stayed zero: nothing was delivered, or not to FLAG."
assert lengths == [5, 4000, 5], "The flag must hold the length, in the byte order of the hosts."
assert found == [b"first", b"and a longer one" * 250, b"third"], "The text at TEXT is another one."
### BEGIN HIDDEN TESTS
lab.bob.run("told = ep.rcq.poll()[0]")
assert lab.bob.get("told") == 0, "Bob has a completion: this was more than RDMA WRITE."
### END HIDDEN TESTS
assert None not in found, "A later message did not arrive."


# %%
# %%on alice
def left_over():
    """How many completions are still to be had, a moment later."""
    time.sleep(0.2)
    return len(ep.arrivals.ready["send"]) + ep.scq.poll(16)[0]


# %% check="flag-order" points=2
on_both("fresh()")
with lab.capture() as wire:
    lab.alice.run("deliver(b'x' * 3000); left, flag_at = left_over(), ep.peer.address + FLAG")
lab.bob.run("message = collect()")
writes = [p.reth.va for p in wire.packets if p.src == "alice" and p.reth and not p.again]
left, message = lab.alice.get("left"), lab.bob.get("message")
print(
    f"I saw {len(writes)} WRITEs of alice on the wire; deliver() had not waited for {left} of them."
)
assert writes, "deliver() put no WRITE on the wire."
assert writes[-1] == lab.alice.get("flag_at"), "The flag must be the last thing that alice writes."
assert left == 0, "deliver() returned before its orders were completed."
### BEGIN HIDDEN TESTS
with lab.fault("alice", rate="4mbit"):
    job = lab.bob.start("message = collect(seconds=5)")
    lab.alice.run("deliver(b'y' * 6000)")
    job.result()
whole = lab.bob.get("message") == b"y" * 6000
assert whole, "Bob looked while it arrived, and did not get the whole message."
lab.alice.run("deliver(b'z' * 4000); ep.buffer[0:8192] = bytes(8192)")
lab.bob.run("message = collect(seconds=3)")
whole = lab.bob.get("message") == b"z" * 4000
assert whole, "When deliver() returned, alice's buffer was not free yet."
### END HIDDEN TESTS
assert message == b"x" * 3000, "Bob did not get the whole message."

# %% [markdown]
# ### Task 2: a mailbox with immediate, alice's side (2 points)
#
# Now without a flag, and bob does not look again and again: he waits for completions. His memory has
# four **slots** of 2048 bytes. Alice chooses a slot and writes the message to its beginning; the
# immediate data says which slot it is.
#
# Complete `deliver(slot, message)`. One order is enough.
#
# <details><summary>Hint 1</summary>
#
# Section 5 shows the order. What becomes of the 77 there?
# </details>
# <details><summary>Hint 2</summary>
#
# `ep.post_write(offset, length, remote_offset, imm=...)`, and a wait.
# </details>

# %%
# %%on alice bob
SLOT = 2048


def empty_slots():
    """Both endpoints afresh; bob has eight receives posted, and nothing in his slots."""
    fresh()
    for _ in range(8 if here.name == "bob" else 0):
        ep.post_recv(4 * SLOT, 64)


def beginnings():
    """What stands at the beginning of each slot, as text."""
    places = [ep.buffer[n * SLOT : n * SLOT + 13] for n in range(4)]
    return [found.rstrip(bytes(1)).decode("latin-1") for found in places]


# %% task="slot"
# %%on alice
def deliver(slot, message):
    """WRITE `message` to bob's slot, with the slot's number as immediate; return when done."""
    ### BEGIN SOLUTION
    ep.buffer[0 : len(message)] = message
    ep.post_write(0, len(message), slot * SLOT, imm=slot)
    ep.wait(1)
    ### END SOLUTION


# %% check="slot-wire" points=2
on_both("empty_slots()")
with lab.capture() as wire:
    lab.alice.run("deliver(3, b'to slot three'); deliver(0, b'to slot zero'); left = left_over()")
lab.bob.run("slots, told = beginnings(), ep.rcq.poll(8)[0]")
slots, told = lab.bob.get("slots"), lab.bob.get("told")
sent = [p.imm for p in wire.packets if p.imm is not None and not p.again]
print(f"Immediates on the wire: {sent}; bob was told {told} times. His slots: {slots}.")
assert lab.alice.get("left") == 0, "deliver() returned before its order was completed."
assert (told, len(sent)) != (0, 0), "Nobody told bob: he has no completion."
assert slots[3] == "to slot three", "The message for slot 3 is not at the beginning of slot 3."
assert sent == [3, 0], "The immediate must be the number of the slot."
### BEGIN HIDDEN TESTS
assert slots[0] == "to slot zero", "The message for slot 0 is not at the beginning of slot 0."
### END HIDDEN TESTS
assert told == 2, "Each message must give bob one completion."

# %% [markdown]
# ### Task 3: a mailbox with immediate, bob's side (3 points)
#
# The same mailbox, from the other end. Complete two functions on bob. `get_ready()` is called once,
# before alice delivers anything. `collect()` waits for the next message and returns it as a pair
# `(slot, bytes)`. Alice may deliver the next message as soon as `collect` has returned this one,
# without any further word from bob.
#
# <details><summary>Hint 1</summary>
#
# Each message uses up one receive. When must the one for the second message be posted, at the latest?
# </details>
# <details><summary>Hint 2</summary>
#
# `ep.wait(1, queue="recv")` returns a list with one completion. It has `imm`, and `byte_len`, which
# is the length of what was written.
# </details>
# <details><summary>Hint 3</summary>
#
# `ep.post_recv(4 * SLOT, 64)` in `get_ready`, and again in `collect` before it returns. The message
# stands from `done.imm * SLOT` on.
# </details>

# %%
# %%on alice bob
fresh(min_rnr_timer=31)  # bob posts nothing yet; who comes too early is told to wait 0.5 s
SLOT = 2048


# %%
# %%on alice
def write_to(slot, text):
    """Write to bob's slot; how many times his device has answered 'receiver not ready'."""
    before = counter("rcvd_rnr_err")
    ep.buffer[0 : len(text)] = text
    ep.post_write(0, len(text), slot * SLOT, imm=slot)
    time.sleep(0.1)
    return counter("rcvd_rnr_err") - before


# %% task="wake"
# %%on bob
def get_ready():
    """Do what must be done before the first message can come."""
    ### BEGIN SOLUTION
    ep.post_recv(4 * SLOT, 64)
    ### END SOLUTION


def collect():
    """Wait for the next message; return its slot and its bytes."""
    ### BEGIN SOLUTION
    (done,) = ep.wait(1, queue="recv")
    get_ready()  # for the next one, before anybody can know that it may come
    return done.imm, ep.buffer[done.imm * SLOT : done.imm * SLOT + done.byte_len]
    ### END SOLUTION


# %% check="wake-first" points=1
on_both("fresh(min_rnr_timer=31)")
lab.bob.run("get_ready()")
lab.alice.run("refused = write_to(2, b'first')")
refused = lab.alice.get("refused")
print(f"Alice wrote b'first' to slot 2; 'receiver not ready' came back {refused} times.")
assert refused == 0, "When alice wrote, bob had no receive posted."
lab.bob.run("slot, text = collect() or (None, None)")
got = lab.bob.get("slot"), lab.bob.get("text")
print(f"collect() returned {str(got)[:70]}.")
assert got == (2, b"first"), "collect() did not return the slot and the message."

# %% check="wake-next" points=2
on_both("fresh(min_rnr_timer=31)")
lab.bob.run("get_ready()")
for want in [(1, b"second"), (3, b"x" * 2048), (0, b""), (1, b"fifth")]:
    lab.alice.run(f"refused = write_to{want}")
    print(f"{len(want[1]):4} bytes to slot {want[0]}:", end=" ")
    assert lab.alice.get("refused") == 0, "When the next message came, bob had no receive posted."
    lab.bob.run("slot, text = collect() or (None, None)")
    got = lab.bob.get("slot"), lab.bob.get("text")
    print("collected as written" if got == want else f"collect() returned {str(got)[:70]}")
    assert got == want, "This message was not collected as it was written."
    lab.alice.run("done = ep.wait(1)")
lab.bob.run("told = len(ep.arrivals.ready['recv']) + ep.rcq.poll(8)[0]")
assert lab.bob.get("told") == 0, "Bob has more completions than there were messages."

# %% [markdown]
# ### Task 4: a counter that loses nothing (4 points)
#
# Tickets: whoever draws one gets a number, and no two get the same. The counter is eight bytes at
# `COUNTER` in bob's memory. Alice draws over the wire. Bob draws, too: not with `+= 1` on his own
# memory, but through his own *device*, over a connection from bob to bob. (Section 6: the device's
# atomics are atomic among each other, and not with bob's processor.)
#
# Complete `draw()`. It runs on both hosts: `client` is the endpoint to draw with, on alice as on
# bob; `client.peer` describes bob's memory. Return the ticket, a number: the first one is 0.
#
# <details><summary>Hint 1</summary>
#
# READ, add, WRITE is three steps, and somebody else can come between them. Which operation is one?
# </details>
# <details><summary>Hint 2</summary>
#
# What the counter was *before* is the ticket. It comes into the client's own memory, or is what the
# helper returns.
# </details>
# <details><summary>Hint 3</summary>
#
# `client.post_fetch_add(0, COUNTER, 1)`, then a wait, then the eight bytes at `client.buffer[0:8]`
# as a number; or `client.fetch_add(COUNTER, 1)`, which does all three.
# </details>

# %%
# %%on bob
from pyverbs.mr import MR

RIGHTS = e.IBV_ACCESS_LOCAL_WRITE | e.IBV_ACCESS_REMOTE_WRITE
RIGHTS |= e.IBV_ACCESS_REMOTE_READ | e.IBV_ACCESS_REMOTE_ATOMIC


# %%
# %%on bob
def connect_to_myself():
    """A connection from bob to bob, over which `client` reaches the memory of `ep`."""
    global client, door, shared
    if "client" in globals():
        client.close(), shared.close(), door.close()
    client, door = Endpoint(), Endpoint()
    shared = MR(door.pd, ep.size, RIGHTS, ep.mr.buf)  # the same memory, for this door as well
    memory = {"address": ep.mr.buf, "rkey": shared.rkey, "length": ep.size}
    client.connect_card({**door.card.as_dict(), **memory})
    door.connect_card(client.card)


# %%
# %%on alice bob
COUNTER, BUSY, ENOUGH = 512, 256, 264


def at_zero():
    """Everything afresh on this host: its endpoint, its `client`, and a counter that is 0."""
    global client
    fresh()
    if here.name == "alice":
        client = ep
    else:
        connect_to_myself()


at_zero()


# %% task="counter"
# %%on alice bob
def draw():
    """Draw a ticket: add 1 to bob's counter, and return what it was before."""
    ### BEGIN SOLUTION
    return client.fetch_add(COUNTER, 1)
    ### END SOLUTION


# %%
# %%on alice
def draw_many(count):
    """Wait until bob draws, draw so many, and tell him that it is enough."""
    end = time.monotonic() + 10
    while client.read(BUSY, 1) == bytes(1) and time.monotonic() < end:
        os.sched_yield()
    tickets = [draw() for _ in range(count)]
    client.write(b"!", ENOUGH)
    return tickets


# %%
# %%on bob
def draw_meanwhile(most=1000):
    """Draw until alice has enough."""
    tickets = [draw()]
    ep.buffer[BUSY : BUSY + 1] = b"!"
    while ep.buffer[ENOUGH : ENOUGH + 1] == bytes(1) and len(tickets) < most:
        tickets.append(draw())
    return tickets


# %%
def race(count):
    """Both draw at the same time; alice's tickets, bob's, and the counter's last value."""
    lab.bob.run("ep.buffer[0 : COUNTER + 8] = bytes(COUNTER + 8)")
    job = lab.bob.start("tickets = draw_meanwhile()")
    lab.alice.run(f"tickets = draw_many({count})")
    job.result()
    lab.bob.run("value = int.from_bytes(ep.buffer[COUNTER : COUNTER + 8], sys.byteorder)")
    return lab.alice.get("tickets"), lab.bob.get("tickets"), lab.bob.get("value")


# %% check="counter-alone" points=1
on_both("at_zero()")
lab.alice.run("mine = [draw() for _ in range(5)]")
lab.bob.run("value = int.from_bytes(ep.buffer[COUNTER : COUNTER + 8], sys.byteorder)")
mine, value = lab.alice.get("mine"), lab.bob.get("value")
print(f"Alice drew five tickets, alone: {mine}; then the counter was {value}.")
assert mine != [None] * 5, "draw() returned nothing."
assert value == 5, "After five tickets the counter must be 5."
assert mine == [0, 1, 2, 3, 4], "A ticket is what the counter was before it was raised."

# %% check="counter-race" points=2
on_both("at_zero()")
with lab.fault("alice", delay="2ms"), lab.capture() as wire:
    mine, his, value = race(10)
both = set(mine + his)
print(
    f"Alice drew {len(mine)} tickets and bob {len(his)}, at the same time: {len(both)} are different."
)
print(f"The counter says {value}.")
assert both != {None}, "draw() returned nothing, to neither of them."
assert len(both) == len(mine + his), "Some tickets were drawn twice."
### BEGIN HIDDEN TESTS
assert both == set(range(len(both))), "Some numbers were left out."
writes = [p for p in wire.packets if p.opcode == "RDMA_WRITE_ONLY" and not p.again]
assert len(writes) == 1, "Alice wrote to the counter, and could have undone what others added."
### END HIDDEN TESTS
assert value == len(both), "Additions were lost."

# %% [markdown]
# And when packets get lost? If an atomic's *acknowledgement* is lost or late, alice's device sends
# the order again, and adding twice would be wrong. So bob's device keeps the results of its last atomics, and
# repeats the *answer* instead of the addition: **exactly once**.

# %% check="counter-loss" points=1
on_both("at_zero()")
lab.bob.run("before = counter('duplicate_request')")
with lab.fault("alice", loss="5%", delay="2ms"):
    mine, his, value = race(60)
lab.bob.run("again = counter('duplicate_request') - before")
both = set(mine + his)
print(
    f"5 % of the packets were lost. Of {len(mine + his)} tickets {len(both)} are different, and the"
)
print(f"counter says {value}. Bob's device met {lab.bob.get('again')} orders a second time.")
assert both != {None}, "Under loss, too, draw() returned nothing."
assert both == set(range(len(mine + his))), "Under loss, tickets were drawn twice or left out."
assert value == len(both), "Under loss, the counter and the tickets disagree."

# %% [markdown]
# ### Task 5: choose the operation (5 points)
#
# For each situation, choose the one that fits best: `"SEND"`, `"WRITE"`, `"WRITE with immediate"`,
# `"READ"`, `"fetch-and-add"` or `"compare-and-swap"`.
#
# - **a** A client asks a server to do something. It knows no address in the server's memory; requests
#   differ in length, and the server puts them where it has room.
# - **b** A server has told its clients where in its memory a table lies. A client wants one row, and
#   the server's program shall not be woken for it.
# - **c** A producer fills slot after slot of a ring in the consumer's memory, 64 KiB each, and knows
#   all addresses. The consumer sleeps, and must be told when a slot is complete, and which.
# - **d** Eight hosts share out work: each takes the next number of a list. It must always work at the
#   first attempt, however many do it at once.
# - **e** Eight hosts want the same lock, eight bytes that are 0 when it is free. Whoever takes it puts
#   in its own number; if it is taken, nothing shall change.
#
# <details><summary>Hint 1</summary>
#
# The table at the end of section 7. Ask: who knows the place? Who must be told? Which way do the
# bytes go?
# </details>
# <details><summary>Hint 2</summary>
#
# For d and e, think of two hosts that act in the same moment. With which operation can one of them
# be too late, and with which never?
# </details>

# %% task="choice"
choice = dict.fromkeys("abcde", "")
### BEGIN SOLUTION
choice["a"] = "SEND"
choice["b"] = "READ"
choice["c"] = "WRITE with immediate"
choice["d"] = "fetch-and-add"
choice["e"] = "compare-and-swap"
### END SOLUTION

# %%
MEANING = {"bob_told": "completions at the target", "back": "bytes come back"}
MEANING["changed"] = "changed at the target"
MEANING["changes_always"] = "changes the number even if somebody was quicker"


# %%
def fits(letter, **wanted):
    """What section 7 has measured for the chosen operation, beside what the situation wants."""
    kind = choice.get(letter)
    if kind not in facts:
        print(f"{letter}: {kind!r} is none of the six operations.")
        return None
    found = {name: facts[kind].get(name) for name in wanted}
    for name in wanted:
        verdict = "fits" if found[name] == wanted[name] else f"wanted is {wanted[name]}"
        print(f"{letter}: {kind}: {MEANING[name]}: {found[name]} ({verdict})")
    return found == wanted


# %% check="choice-place" points=3
receive, named = ["place of the receive"], ["place alice named"]
a = fits("a", changed=receive, bob_told=1)
b = fits("b", changed=[], bob_told=0, back=True)
c = fits("c", changed=named, bob_told=1)
assert None not in (a, b, c), "For a, b and c, choose one of the six operations each."
assert a, "a: the client knows no place, and the server's program must act."
assert b, "b: the bytes go from the server to the client, and nobody is woken."
assert c, "c: the producer knows the place, and the consumer must be told."

# %% check="choice-atomic" points=2
d = fits("d", changed=named, bob_told=0, back=True, changes_always=True)
e = fits("e", changed=named, bob_told=0, back=True, changes_always=False)
assert None not in (d, e), "For d and e, choose one of the six operations each."
late = "d: with compare-and-swap a host can be too late, and must try again."
assert choice["d"] != "compare-and-swap", late
taken = "e: fetch-and-add changes the eight bytes of a lock that is taken, too."
assert choice["e"] != "fetch-and-add", taken
assert d and e, "Both change eight bytes and bring back what they were, in one step."
### BEGIN HIDDEN TESTS
assert (choice["d"], choice["e"]) == ("fetch-and-add", "compare-and-swap"), "d and e: section 7."
### END HIDDEN TESTS
assert choice["d"] != choice["e"], "d and e want two different things of the same eight bytes."

# %% [markdown]
# ## On hardware
#
# - **Who works.** Here the guest's CPU does bob's part of a WRITE or a READ, in the kernel. With a
#   card, the card does it, and the 2000 WRITEs of section 8 take nothing of bob's processors.
# - **So one-sided is always better?** Not so. HERD (Kalia, Kaminsky, Andersen: *Using RDMA Efficiently
#   for Key-Value Services*, SIGCOMM 2014) does without READs: clients WRITE a request into the server's
#   memory and the server's CPU sends the answer, in one round trip; up to 26 million operations per
#   second, at 5 µs on average. FaSST (the same authors, OSDI 2016) uses two-sided messages only, and
#   reports almost twice the throughput of the one-sided FaRM on one benchmark, with close to half the
#   hardware. Count round trips before you count CPUs.
# - **Atomics** are slow on many cards. The authors of *Design Guidelines for High Performance RDMA
#   Systems* (USENIX ATC 2016) note 2.7 million per second for a ConnectX-3, and 1.8 million when the
#   counters do not fit into the CPU's cache (`atomics-sequencer/main.h` of their `rdma_bench`).
# - **Atomic with the CPU?** Several Linux drivers say `ATOMIC_HCA`, like Soft-RoCE. Some offer atomics
#   only if the platform's PCIe can carry atomic operations (Linux commit 254cd2590d40, `bnxt_re`).
# - **The order of bytes.** `ibv_reg_mr(3)` of current rdma-core says under *Ordering semantics*: the
#   order in which the bytes of one message reach memory is not guaranteed; many NICs and platforms
#   write in ascending order; relaxed ordering takes that away, too; and programs must rely on
#   completions. Where a network may choose another path for each packet, NCCL sends the data as a
#   WRITE and behind it a WRITE with immediate of zero bytes, whose completion comes after all of it
#   (NCCL, issue 850).
# - **RNR** comes from slow programs, not from slow networks. ConnectX cards count it as
#   `rnr_nak_retry_err` and `out_of_buffer` (Linux commit 0ad17a8f7fa0).
#
# ## What this does not show
#
# - What bob's *processor* does. Section 8 counts bob's *program*. The kernel's worker threads that
#   play bob's card use the same processors, and are in nobody's account here.
# - Order that breaks. Soft-RoCE copies packet by packet, upwards, on one path. Torn records you have
#   seen; a last byte that comes too early you have not.
# - How fast any of it is. Lab 04 measures latency, Lab 05 throughput.
# - Operations that only some devices have: atomics of other sizes, and the ATOMIC WRITE and FLUSH of
#   the specification's Annex A19, which are about memory that keeps its content.
#
# ## Food for thought
#
# 1. Alice WRITEs a record and then crashes before the flag. What does bob see, now and later? What
#    if she crashes *between* two packets of the record?
# 2. A server with 1000 clients and SEND must have receives posted for all of them. With WRITE into a
#    slot for each client it needs none, but must look into 1000 slots. Which would you take for
#    requests that come rarely? (Lab 07 knows a third way.)
# 3. A lock by compare-and-swap: its holder's host dies. Who frees it?
# 4. In section 8 WRITE with immediate cost bob as much as SEND. When is it still the better one?
#
# ## Troubleshooting
#
# | symptom | likely cause | do |
# |:--|:--|:--|
# | `IBV_WC_RNR_RETRY_EXC_ERR` | no receive was posted in time | post it *before* what lets the peer send; then the task's first cells again |
# | a message is late by 0.66 s or a multiple | RNR with `min_rnr_timer` 0 | `counter("rcvd_rnr_err")` before and after |
# | `WaitTimeout` on the receiving side | a plain WRITE gives the target no completion | WRITE with immediate, or SEND |
# | `IBV_WC_REM_ACCESS_ERR` | address or key of an older connection, or past the end | `fresh()` on both hosts |
# | `IBV_WC_REM_INV_REQ_ERR`, or `EINVAL` for an atomic | the address is no multiple of eight, or the queue pair lacks the right | look at the place, and at Lab 01's table of rights |
# | the right bytes, then wrong ones | the buffer was written to before the completion | `ep.wait()` first |
# | `CardError`, or `connect` waits | only one of the hosts was in `connect` | `on_both("fresh()")` |
# | a host is busy | a background cell waits for a message that never comes | it has a deadline; or `lab.bob.interrupt()` |
#
# ## Further reading
#
# - `ibv_post_send(3)` (operations, inline, who owns the buffer), `ibv_post_recv(3)`, `ibv_modify_qp(3)`
#   (`min_rnr_timer`, `rnr_retry`), `ibv_reg_mr(3)` (*Ordering semantics*),
#   `ibv_query_qp_data_in_order(3)`.
# - InfiniBand Trade Association, *InfiniBand Architecture Specification*, Volume 1, chapter 9: packets,
#   acknowledgements, RNR NAK; chapter 10: work requests and completions.
# - Kalia, Kaminsky, Andersen: *Using RDMA Efficiently for Key-Value Services*, SIGCOMM 2014, and
#   *FaSST*, OSDI 2016. Two sides of the argument in this lab's title.
#
# **Next lab:** 04, *Measure TCP against RDMA latency*.

# %% [markdown]
# ## Clean up
#
# Each host closes what it has opened. The hosts themselves go on running for the next lab;
# `lab.down()` stops them.

# %%
# %%on alice bob
for name in ("client", "shared", "door", "ep"):
    if name in globals():
        globals().pop(name).close()
