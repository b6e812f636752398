# %% [markdown]
# # Lab 01: Register memory
#
# Give a device memory to work with: why it has to be told, what that pins and what it costs, and
# what the keys protect.
#
# ![Drawing. Two hosts on one virtual Ethernet, alice with the address 10.0.0.1 and bob with
# 10.0.0.2. In each, a part of the process's memory, 4096 bytes, is a region. The device of the host
# keeps a table of regions. Alice's own orders name her region by its lkey; the RDMA WRITE that
# crosses the wire names bob's region by address and rkey.](images/01_regions.svg)
#
# | | |
# |:--|:--|
# | **You will do** | watch memory being pinned, try all 16 combinations of rights, run into a limit, build a memory pool, give seventeen orders, most of which somebody should refuse |
# | **You will learn** | why a device needs a translation table of its own; protection domain, lkey, rkey; what registration costs; who hears of which error |
# | **You need** | 75 minutes, 700 MB of free memory, any backend |
# | **Before this** | [Lab 00](00_meet_your_hosts.ipynb): context, domain, region, queue pair, completion |
#
# As in Lab 00, write your *predictions* down before you run a cell.

# %% [markdown]
# ## Start

# %%
# %load_ext rdmalab
import rdmalab

lab = rdmalab.up()
# %hosts

# %% [markdown]
# ## 1 An address that only you understand
#
# The address in a pointer is **virtual**. The processor translates it with a *page table*, which
# belongs to one process: page by page (4096 bytes here), it says in which *frame* of the physical
# memory the bytes lie. An RDMA device sits beside the processor. It reads and writes physical
# memory by itself (*DMA*, direct memory access), at any time, for many processes, and does not use
# your page table. Worse, the page table is no firm ground:
#
# - a page may not exist yet: Linux gives memory at the first touch, not when you ask for it;
# - a page may move: the kernel compacts memory, swaps pages out, copies a page that two processes
#   share when one of them writes.
#
# So before a device can use your memory, the kernel must do three things: make all pages exist and
# **pin** them, so that none moves; give the device a **table of its own**; and note **who may do
# what** with it. All that is **registering a memory region**, one call: `ibv_reg_mr`, or `MR(...)`
# in pyverbs.
#
# ![Drawing. Four pages of a buffer, of which the last is only a promise. The processor translates
# them by the process's page table, which says page 0 is in frame 44, page 1 in frame 46, page 2 in
# frame 41, page 3 nowhere yet. The RDMA device has its own table, filled at registration, under a
# key: the same frames, with the rights and the first and last byte. A work request or a packet
# names key, address and length. The registered frames must stay where they are: they are
# pinned.](images/01_translation.svg)
#
# Which pages of its memory exist, a process may ask the kernel: `mincore(2)`. The next cells make
# three small tools for that. How they are built is not the subject; what they return is.

# %%
# %%on alice bob
import ctypes
import mmap

import pyverbs.enums as e
from pyverbs.device import Context
from pyverbs.mr import MR
from pyverbs.pd import PD
from rdmalab import here

PAGE, MIB = mmap.PAGESIZE, 1 << 20
for end in globals().get("ends", {}).values():
    end.close()  # what an earlier run of this lab has left open


# %%
# %%on alice bob
def address_of(memory):
    """Where the bytes of an `mmap` begin, as a number."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def allocate(length, pages=mmap.MADV_NOHUGEPAGE):
    """Memory straight from the kernel, in pages of 4096 bytes; nothing of it touched yet."""
    memory = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(pages)  # without this, Linux uses pages of 2 MiB where they fit
    return memory


# %%
# %%on alice
def pages_that_exist(memory):
    """How many pages of `memory` have a frame behind them: mincore(2) fills in a byte for each."""
    pages = (ctypes.c_ubyte * (len(memory) // PAGE))()
    where, length = ctypes.c_void_p(address_of(memory)), ctypes.c_size_t(len(memory))
    ctypes.CDLL(None).mincore(where, length, pages)
    return sum(page & 1 for page in pages)


# %% [markdown]
# **Predict.** Alice asks for 1 MiB, which is 256 pages. How many of them exist then? How many after
# she has written one byte into three of them? How many after she has registered all of it?

# %%
# %%on alice
memory = allocate(MIB)
print("allocated:   ", pages_that_exist(memory), "of", MIB // PAGE, "pages exist")
for page in (0, 7, 100):
    memory[page * PAGE] = 1
print("3 touched:   ", pages_that_exist(memory), "pages")
with Context(name=here.device) as ctx, PD(ctx) as pd:
    mr = MR(pd, MIB, e.IBV_ACCESS_LOCAL_WRITE, address_of(memory))
    print("registered:  ", pages_that_exist(memory), "pages")
    mr.close()

# %% [markdown]
# **What happened.** Asking for memory gave a promise; touching it gave three pages. Registering gave
# the rest, all at once: the device cannot take a *page fault* and wait for the kernel as the
# processor does, so no page may be missing. Three numbers stand in the call: where the memory
# begins, how long it is, and what may be done with it.

# %% [markdown]
# ## 2 Pinned
#
# That a page exists is not enough: it must also stay. The kernel counts the pages that a process
# has had pinned for devices and shows the sum as `VmPin` in `/proc/PID/status`.
#
# **Predict.** Alice registers the same 1 MiB **twice**, and then takes one region back. How large
# is `VmPin` after each step?

# %%
# %%on alice
import os
import subprocess


def show_pin(when):
    """Print this process's VmPin (`/proc/self` would be grep's own)."""
    command = ["grep", "VmPin", f"/proc/{os.getpid()}/status"]
    print(f"{when:28}", subprocess.check_output(command, text=True).strip())


# %%
# %%on alice
with Context(name=here.device) as ctx, PD(ctx) as pd:
    show_pin("nothing registered")
    first = MR(pd, MIB, e.IBV_ACCESS_LOCAL_WRITE, address_of(memory))
    show_pin("1 MiB registered")
    second = MR(pd, MIB, e.IBV_ACCESS_LOCAL_WRITE, address_of(memory))
    show_pin("the same 1 MiB again")
    first.close()
    show_pin("first region taken back")
    second.close()
    show_pin("second region taken back")

# %% [markdown]
# **What happened.** Each registration counts in full, also of memory that is pinned already: the
# number is an *account of registrations*, not a number of different pages. And one region taken
# back does not unpin what another still needs.
#
# Pinned memory is taken from everybody else: it cannot be swapped out or moved, however little it is
# used. Section 5 shows how a system defends itself.

# %% [markdown]
# ### Task 1: read pinned memory (3 points)
#
# Complete two functions.
#
# - `pinned_bytes(status)` gets the text of a `/proc/PID/status` and returns how much that process
#   has pinned, in **bytes**.
# - `pages_pinned(address, length)` returns how many pages the registration of `length` bytes from
#   `address` on pins. A page can only be pinned as a whole, and a region may begin and end anywhere
#   in one. Page 0 is the bytes 0 to `PAGE - 1` of the address space.
#
# <details><summary>Hint 1</summary>
#
# The line looks like <code>VmPin:     1024 kB</code>, and what the kernel calls kB here is
# 1024 bytes. <code>line.split()</code> cuts it into three words.
# </details>
# <details><summary>Hint 2</summary>
#
# Which page does the first byte lie in? <code>address // PAGE</code>. What is the address of the
# <i>last</i> byte, and which page does that lie in?
# </details>
# <details><summary>Hint 3</summary>
#
# The last byte is at <code>address + length - 1</code>. From page a to page b there are b - a + 1
# pages.
# </details>


# %% task="pinned"
# %%on alice
def pinned_bytes(status):
    """The pinned memory, in bytes, of the process whose /proc/PID/status reads `status`."""
    ### BEGIN SOLUTION
    for line in status.splitlines():
        if line.startswith("VmPin:"):
            return int(line.split()[1]) * 1024
    ### END SOLUTION


def pages_pinned(address, length):
    """How many pages a registration of `length` bytes from `address` on pins."""
    ### BEGIN SOLUTION
    return (address + length - 1) // PAGE - address // PAGE + 1
    ### END SOLUTION


# %% check="pinned-bytes" points=1
# %%on alice
def own_status():
    """The text of /proc/self/status."""
    with open("/proc/self/status") as file:
        return file.read()


with Context(name=here.device) as ctx, PD(ctx) as pd:
    before = pinned_bytes(own_status())
    with MR(pd, 3 * PAGE, e.IBV_ACCESS_LOCAL_WRITE):
        after = pinned_bytes(own_status())
print(f"Before a region of 3 pages your function said {before!r}, with it {after!r}.")
assert type(before) is type(after) is int, "A number of bytes was expected, as an `int`."
assert after - before == 12288, "It should have grown by 3 pages of 4096 bytes. Look at the unit."
### BEGIN HIDDEN TESTS
found = pinned_bytes("Name:\tnfsd\nVmLck:\t       8 kB\nVmPin:\t   65664 kB\nVmHWM:\t   90000 kB\n")
assert found == 65664 * 1024, f"In another process's text VmPin was 65664 kB, not {found} bytes."
### END HIDDEN TESTS
assert pinned_bytes(own_status()) == before, "With the region gone, it should be as before."

# %% check="pinned-pages" points=2
# %%on alice
places = [(0, 4096), (0, 4097), (100, 1), (4095, 1), (4095, 2), (2048, 4096), (1, 12288)]
start, grown = address_of(memory), []
with Context(name=here.device) as ctx, PD(ctx) as pd:
    for offset, length in places:
        before = own_status().split("VmPin:")[1].split()[0]
        with MR(pd, length, e.IBV_ACCESS_LOCAL_WRITE, start + offset):
            after = own_status().split("VmPin:")[1].split()[0]
        grown.append((int(after) - int(before)) * 1024 // PAGE)
answers = [pages_pinned(start + offset, length) for offset, length in places]
for (offset, length), pages, answer in zip(places, grown, answers, strict=True):
    print(f"{length:5} bytes from byte {offset:4} on: {pages} pages pinned, your answer {answer}")
assert answers == grown, "Compare the lines: where does the first byte lie, and where the last?"
### BEGIN HIDDEN TESTS
assert pages_pinned(5 * PAGE - 1, PAGE + 2) == 3, "The first and the last byte may share no page."
### END HIDDEN TESTS

# %% [markdown]
# ## 3 Domain and keys
#
# A region is made *in* a **protection domain** (PD), as are queue pairs. The device lets a queue
# pair touch only regions of its own domain: the domain is the fence, the keys are the doors in it.
#
# - The **lkey** (local key) stands in the orders of the region's owner: *send from here, receive
#   into there*.
# - The **rkey** (remote key) is what the owner hands to a peer. It stands in the packets of the
#   peer's WRITE, READ and atomic orders. (A READ fetches bytes from the peer's memory; an atomic
#   order changes 8 bytes there in one go and brings back what they were. Lab 03 is about all of them.)
#
# **Predict.** Alice registers the same page four times. Are the keys equal? Is a key that was given
# back used again?

# %%
# %%on alice
LOCAL, REMOTE_READ = e.IBV_ACCESS_LOCAL_WRITE, e.IBV_ACCESS_REMOTE_READ
with Context(name=here.device) as ctx, PD(ctx) as pd:
    for rights in (LOCAL, LOCAL, REMOTE_READ, REMOTE_READ):
        with MR(pd, PAGE, rights, address_of(memory)) as mr:
            name = "remote read" if rights == REMOTE_READ else "local write"
            print(f"{name}: lkey {mr.lkey:#010x}, rkey {mr.rkey:#010x}")

# %% [markdown]
# **What happened.** Each registration has a key of its own, also for the same page with the same
# rights, and no old key came back. Soft-RoCE puts the row of its table into the upper 24 bits and a
# random number into the lower 8, so that a key that was kept too long is noticed (mostly: 8 bits are
# few).
#
# Soft-RoCE makes lkey and rkey equal, and gives an rkey even to a region that no peer may touch: a
# key without a right opens nothing. Other devices may do otherwise. **Never mix the two up** because
# it happens to work here.
#
# A key is a number of 32 bits that crosses the wire in the clear. It is a means against accidents,
# and a weak one against attackers: see *On hardware*.

# %% [markdown]
# ## 4 Rights
#
# Four flags say what may be done with a region. Local *reading* (to send from it, to be the source
# of a WRITE) is always allowed.
#
# | flag | the device may … |
# |:--|:--|
# | `IBV_ACCESS_LOCAL_WRITE` | write into it on the *owner's* orders: received messages, answers to the owner's READ |
# | `IBV_ACCESS_REMOTE_WRITE` | write into it on a *peer's* order: WRITE |
# | `IBV_ACCESS_REMOTE_READ` | read from it on a *peer's* order: READ |
# | `IBV_ACCESS_REMOTE_ATOMIC` | change 8 bytes of it on a *peer's* order: compare-and-swap, fetch-and-add |
#
# **Predict.** That makes 16 combinations. Some of them the kernel refuses. Which, and why?

# %%
# %%on alice
import errno
import itertools

from pyverbs.pyverbs_error import PyverbsRDMAError

NONE, LOCAL, WRITE = 0, e.IBV_ACCESS_LOCAL_WRITE, e.IBV_ACCESS_REMOTE_WRITE
READ, ATOMIC = e.IBV_ACCESS_REMOTE_READ, e.IBV_ACCESS_REMOTE_ATOMIC


# %%
# %%on alice
def register(pd, rights):
    """Try to register one page: the answer in a word."""
    try:
        MR(pd, PAGE, rights).close()
        return "ok"
    except PyverbsRDMAError as error:
        return errno.errorcode[error.error_code]


# %%
# %%on alice
answers = {}
print("local write  remote write  remote read  remote atomic")
with Context(name=here.device) as ctx, PD(ctx) as pd:
    for wish in itertools.product((NONE, LOCAL), (NONE, WRITE), (NONE, READ), (NONE, ATOMIC)):
        answers[sum(wish)] = register(pd, sum(wish))
        row = "".join(f"{'yes' if right else '-':^13}" for right in wish)
        print(row, answers[sum(wish)])
print(list(answers.values()).count("EINVAL"), "of", len(answers), "refused")

# %% [markdown]
# **What happened.** Six are refused, all with `EINVAL`, *invalid argument*. Your rule?
#
# Who lets a peer **change** memory (remote write, remote atomic) must let the own device change it,
# too (local write): it is the own device that puts the bytes there. The InfiniBand specification
# demands this, `ibv_reg_mr(3)` says so, and Linux checks it before the device is asked. Reading is
# different: *remote read* alone is a good combination, and Task 4 needs it.
#
# Does the rule explain all sixteen answers?

# %%
# %%on alice
for rights, answer in answers.items():
    forbidden = bool(rights & (WRITE | ATOMIC)) and not rights & LOCAL
    assert (answer == "EINVAL") == forbidden, f"the rule does not explain {rights}: {answer}"
print("The rule explains all", len(answers), "answers.")

# %% [markdown]
# The error says nothing about *which* argument is invalid. So remember the symptom: `EINVAL` from
# registering usually means that local write was forgotten.
#
# The queue pair has flags, too (`qp_access_flags`, set on the way to INIT): an operation needs its
# right on **both**. A peer's right counts at the region that the *packet* names, a local right at
# the region that the *order* names.

# %% [markdown]
# ### A device that talks to itself
#
# To try rights, alice connects two queue pairs of her own with each other, through her own device,
# and gives an order. `Endpoint` from `rdmalab.verbs` bundles what Lab 00 made by hand: context,
# domain, queues, a region and a queue pair. The orders stay plain pyverbs. Read `trial`: everything
# else leads up to it.

# %%
# %%on alice bob
import os
import time

import pyverbs.enums as e
from pyverbs.mr import MR
from pyverbs.wr import SGE, RecvWR, SendWR
from rdmalab.verbs import Endpoint


# %%
# %%on alice bob
def wait(queue, seconds=5):
    """The status, as text, of the next completion in `queue`."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        count, completions = queue.poll()
        if count:
            return e.ibv_wc_status(completions[0].status).name.removeprefix("IBV_WC_")
        time.sleep(0.0002)  # let others run: the device is software
    raise TimeoutError(f"no completion within {seconds} s")


# %%
# %%on alice bob
SEND, RDMA_WRITE, RDMA_READ = e.IBV_WR_SEND, e.IBV_WR_RDMA_WRITE, e.IBV_WR_RDMA_READ
FETCH_ADD = e.IBV_WR_ATOMIC_FETCH_AND_ADD


def post(end, opcode, piece, target):
    """Order `opcode` between `piece` of own memory and `target`, (address, rkey): its status."""
    order = SendWR(opcode=opcode, num_sge=1, sg=[piece])
    if opcode == FETCH_ADD:
        order.set_wr_atomic(target[1], target[0], 5, 0)  # add 5
    elif opcode != SEND:
        order.set_wr_rdma(target[1], target[0])
    end.qp.post_send(order)
    return wait(end.scq)


# %%
# %%on alice
PURPOSES = {  # what the region is for, who orders, and what
    "send": ("alice sends messages from it", "near", SEND),
    "receive": ("messages of a peer arrive in it", "far", SEND),
    "mailbox": ("a peer leaves notes in it with WRITE", "far", RDMA_WRITE),
    "catalogue": ("a peer looks things up in it with READ", "far", RDMA_READ),
    "answers": ("what alice's own READs fetch from a peer is put here", "near", RDMA_READ),
    "counter": ("peers count in it with fetch-and-add", "far", FETCH_ADD),
}


# %%
# %%on alice
def trial(purpose, flags):
    """Use a region that has these rights for `purpose`: the status of the order."""
    with Endpoint() as near, Endpoint() as far, MR(near.pd, 64, flags) as mr:
        near.connect_card(far.card)
        far.connect_card(near.card)
        tested, plain = SGE(mr.buf, 8, mr.lkey), SGE(far.mr.buf, 8, far.mr.lkey)
        near.qp.post_recv(RecvWR(num_sge=1, sg=[tested]))
        far.qp.post_recv(RecvWR(num_sge=1, sg=[plain]))
        _, who, opcode = PURPOSES[purpose]
        if who == "near":
            return post(near, opcode, tested, (far.mr.buf, far.mr.rkey))
        return post(far, opcode, plain, (mr.buf, mr.rkey))


# %%
# %%on alice
def outcome(purpose, flags):
    """As `trial`; also for flags that cannot be registered, and for none given."""
    if not isinstance(flags, int):
        return "no flags given"
    try:
        return trial(purpose, flags)
    except PyverbsRDMAError as error:
        return errno.errorcode[error.error_code]


# %% [markdown]
# ### Task 2: the right flags for a purpose (4 points)
#
# `PURPOSES`, a few cells up, says what six regions are for. Fill `rights`: for each purpose the
# **smallest** combination of `NONE`, `LOCAL`, `WRITE`, `READ` and `ATOMIC` (joined by `|`) that
# serves it. The first check tries your flags on the device; the second takes each of them away in
# turn and looks whether anything misses it.
#
# <details><summary>Hint 1</summary>
#
# Ask twice for each region: does a device <i>write</i> into it, or only read from it? And on whose
# order, the owner's or a peer's?
# </details>
# <details><summary>Hint 2</summary>
#
# An own READ brings bytes <i>into</i> the region. That the peer's side calls it reading does not
# matter: here it is writing, on the owner's order.
# </details>
# <details><summary>Hint 3</summary>
#
# One needs nothing at all, one needs READ alone, two need LOCAL alone, and two need LOCAL and
# something else.
# </details>

# %% task="flags"
# %%on alice
rights = dict.fromkeys(PURPOSES)  # purpose -> flags, such as rights["send"] = LOCAL | ATOMIC
### BEGIN SOLUTION
rights["send"] = NONE
rights["receive"] = LOCAL
rights["mailbox"] = LOCAL | WRITE
rights["catalogue"] = READ
rights["answers"] = LOCAL
rights["counter"] = LOCAL | ATOMIC
### END SOLUTION

# %% check="flags-enough" points=2
# %%on alice
results = {purpose: outcome(purpose, rights.get(purpose)) for purpose in PURPOSES}
for purpose, status in results.items():
    print(f"{purpose:10} {status:16} ({PURPOSES[purpose][0]})")
failed = [purpose for purpose, status in results.items() if status != "SUCCESS"]
assert not failed, f"With your flags this does not work: {', '.join(failed)}."

# %% check="flags-least" points=2
# %%on alice
needless = {}
for purpose in PURPOSES:
    flags = rights[purpose] if isinstance(rights.get(purpose), int) else NONE
    for name, flag in {"LOCAL": LOCAL, "WRITE": WRITE, "READ": READ, "ATOMIC": ATOMIC}.items():
        if flags & flag and outcome(purpose, flags & ~flag) == "SUCCESS":
            needless[purpose] = name
            print(f"{purpose:10} works without {name}, too")
print(f"I took each right away in turn. Regions that did not miss one: {len(needless)}.")
works = all(results.get(purpose) == "SUCCESS" for purpose in PURPOSES)
assert works, "First make all six work; then I can tell which rights nobody needs."
assert not needless, "A right that nobody needs is an open door. See the lines above."

# %% [markdown]
# ## 5 A limit
#
# Pinned memory is lost to everybody else, so each process has a limit for it: `RLIMIT_MEMLOCK`.
# Alice's host has 160 MiB of memory. What is her limit?

# %%
# %%on alice
import resource


def pinned_now():
    """What this process has pinned, in bytes."""
    with open("/proc/self/status") as status:
        (line,) = (line for line in status if line.startswith("VmPin:"))
    return int(line.split()[1]) * 1024


soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
print("limit:", soft, "bytes, that is", soft // MIB, "MiB; in the unit of ulimit -l:")
# !ulimit -l

# %% [markdown]
# **Predict.** Alice registers 40 MiB. Then she registers *the same* 40 MiB once more, which needs
# not one more page. Will it work? And 65 MiB in one piece?


# %%
# %%on alice
def try_to_pin(pd, memory, size):
    """A region over the first `size` bytes of `memory`, or None; says what happened."""
    before = pinned_now()
    try:
        region = MR(pd, size, LOCAL, address_of(memory))
    except PyverbsRDMAError as error:
        name = errno.errorcode[error.error_code]
        print(f"{size >> 10:6} KiB asked, {before >> 10:6} KiB pinned before: {name}. {error}")
        return None
    print(f"{size >> 10:6} KiB asked, {before >> 10:6} KiB pinned before: ok")
    return region


# %%
# %%on alice
big = allocate(65 * MIB)
with Context(name=here.device) as ctx, PD(ctx) as pd:
    pinned = [try_to_pin(pd, big, size) for size in (40 * MIB, 40 * MIB)]
    if pinned[0]:
        pinned[0].close()
    pinned += [try_to_pin(pd, big, 65 * MIB)]
print("pages of `big` that exist:", pages_that_exist(big), "of", 65 * MIB // PAGE)
big.close()
assert [region is not None for region in pinned] == [True, False, False]

# %% [markdown]
# **What happened.** `ENOMEM`, *Cannot allocate memory*: but there was memory enough. What had run
# out is the **right to pin**: asked + pinned > limit. (Look at the last line: of the 65 MiB, no page
# was touched beyond the 40 MiB that had been registered before. The kernel refuses first, and
# without looking at a page.) So when registering fails with `ENOMEM`, look at three numbers:
#
# | number | where |
# |:--|:--|
# | what you asked for | your program |
# | what the process has pinned | `VmPin` in `/proc/PID/status` |
# | the limit | `Max locked memory` in `/proc/PID/limits` |
#
# The limit is *per process*, and a process with the capability `CAP_IPC_LOCK` (root, usually) has
# none. So "it works as root" is no riddle.

# %% [markdown]
# Linux itself gives a process 8 MiB, before version 5.16 it was 64 KiB, and containers and services
# often start with that. Here alice may pin 64 KiB (beside what an earlier lab has perhaps left).
#
# **Predict.** Will 16 KiB work? 1 MiB?

# %%
# %%on alice
memory = allocate(MIB)
resource.setrlimit(resource.RLIMIT_MEMLOCK, (pinned_now() + (64 << 10), hard))
try:
    with Context(name=here.device) as ctx, PD(ctx) as pd:
        small = [try_to_pin(pd, memory, size) is not None for size in (16 << 10, MIB)]
finally:
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (hard, hard))
assert small == [True, False]

# %% [markdown]
# pyverbs hands on what the kernel said. `Endpoint` looks at the three numbers before it complains:

# %%
# %%on alice
from rdmalab.verbs import EndpointError

resource.setrlimit(resource.RLIMIT_MEMLOCK, (pinned_now() + (64 << 10), hard))
try:
    Endpoint(size=MIB)
except EndpointError as error:
    print(error)
finally:
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (hard, hard))

# %% [markdown]
# The places to raise it speak three units, and a factor of 1024 has cost many an afternoon:
#
# | place | unit |
# |:--|:--|
# | `ulimit -l`, `/etc/security/limits.conf` (`memlock`) | KiB |
# | `docker run --ulimit memlock=…`, `setrlimit(2)` | bytes |
# | `LimitMEMLOCK=` of a systemd service | bytes, or with a suffix: `64M` |

# %% [markdown]
# ## 6 What it costs
#
# Registering is a system call, and the kernel has work for every page: find it, pin it, write it
# into the device's table. Is it dear? Compare with the other way to make data ready for a device:
# copy it into memory that is registered already.
#
# **Predict.** How does the time grow from 4 KiB to 16 MiB? Which is quicker for 4 KiB, registering
# or copying? And for 16 MiB?

# %%
# %%on alice
import statistics
import time


def times_us(action, rounds=9):
    """How long `action` takes, in microseconds: best quarter, shortest, median."""
    taken = []
    for _ in range(rounds):
        start = time.perf_counter_ns()
        action()
        taken.append((time.perf_counter_ns() - start) / 1000)
    quarter, middle, _ = statistics.quantiles(taken, n=4)
    return [quarter, min(taken), middle]  # what else the machine did only ever adds


# %%
# %%on alice
def filled(size, pages):
    """Memory of which every page exists."""
    memory = allocate(size, pages)
    memory[:] = bytes(size)
    return memory


def pin(pd, memory):
    """Register `memory`, and take the region back."""
    MR(pd, len(memory), LOCAL, address_of(memory)).close()


# %%
# %%on alice
def costs(pd, size):
    """What it takes to make `size` bytes ready for the device, in four ways."""
    small, huge = filled(size, mmap.MADV_NOHUGEPAGE), filled(size, mmap.MADV_HUGEPAGE)
    target, source = address_of(huge), address_of(small)
    return {
        "register": times_us(lambda: pin(pd, small)),
        "register, 2 MiB pages": times_us(lambda: pin(pd, huge)),
        "register, new pages": times_us(lambda: pin(pd, allocate(size))),
        "copy instead": times_us(lambda: ctypes.memmove(target, source, size)),
    }


# %%
# %%on alice
sizes, taken = [4096 * 4**step for step in range(7)], {}
with Context(name=here.device) as ctx, PD(ctx) as pd:
    for size in sizes:
        for way, times in costs(pd, size).items():
            taken.setdefault(way, []).append([size, *times])
print(f"{'KiB':23}", *(f"{size >> 10:9}" for size in sizes), "  microseconds:")
for way, rows in taken.items():
    print(f"{way:23}", *(f"{row[1]:9.0f}" for row in rows))
first, last = taken["register"][0], taken["register"][-1]
each = (last[1] - first[1]) / (last[0] // PAGE - 1)
print(f"registering: {first[1]:.0f} us for one page, {each:.2f} us for each further page")

# %%
from rdmalab import view

view.lines(
    {way: {size: times for size, *times in rows} for way, rows in lab.alice.get("taken").items()},
    x_label="size",
    x_unit="B",
    y_label="time, best quarter",
    y_unit="us",
    title="What does it take to make memory ready for a device?",
    lab=lab,
)

# %% [markdown]
# **What happened.** The line *register* begins flat: a registration has a **fixed price**, whatever
# its size (the call, the entry in the table, the key). Then the **price per page** takes over. Where
# the memory is in pages of 2 MiB, there are 512 times fewer of them, and the line rises much later.
# *New pages* do not exist yet, so the kernel must find and clear them; somebody has to pay for that
# once, and here it was the registration.
#
# The *copy* has almost no fixed price. So **small messages are copied** into memory that is
# registered already, and **large ones are sent from where they are**. Where the two lines cross
# depends on processor, kernel and device; libraries for any message (MPI, UCX) have a threshold.
#
# The microseconds may be those of an emulated processor. The *shape* is what you take home. (Jagged,
# or falling? The machine was busy: run the cell again.)

# %% [markdown]
# ## 7 Register early, use often
#
# Real systems do not pay that price for each message:
#
# - a **pool**: one large region at the start, handed out in slots (usual for receive buffers, in
#   storage and in key-value stores);
# - a **registration cache**: regions are kept after use, in case the same buffer comes again (UCX,
#   libfabric and Open MPI have one; the difficulty is to notice that the program has freed the
#   memory);
# - **everything at once**: the whole heap is one region (some databases and parallel languages).
#
# ![Drawing. One memory region with one lkey, cut into four slots of equal size at the offsets 0,
# size, 2 size and 3 size. Slots 0 and 2 are taken, 1 and 3 free. take() hands out an offset,
# give(offset) takes it back: list operations, without kernel and device.](images/01_pool.svg)
#
# How many regions does the kernel think there are? It keeps a list:

# %%
# %%on alice
import json


def regions_of_mine():
    """How many memory regions this host's device has, by the kernel's list."""
    command = ["rdma", "-j", "resource", "show", "mr"]
    listed = json.loads(subprocess.check_output(command) or "[]")
    return sum(region["ifname"] == here.device for region in listed)


with Context(name=here.device) as ctx, PD(ctx) as pd, MR(pd, PAGE, NONE), MR(pd, PAGE, NONE):
    print("with two regions more:", regions_of_mine())
print("without them:", regions_of_mine())


# %%
# %%on alice
def tried(function, *arguments):
    """What a function returns, or in words what it raises: the checks below use it."""
    try:
        return function(*arguments)
    except Exception as error:
        return f"raised {error!r}"


# %% [markdown]
# ### Task 3: a memory pool (4 points)
#
# Complete `Pool`. It registers `count * size` bytes **once** (right: `LOCAL`), in `self.mr`, and
# hands out slots of `size` bytes:
#
# - `take()` returns the offset of a free slot in the region, `None` when all are taken;
# - `give(offset)` takes a slot back, and it may be handed out again.
#
# <details><summary>Hint 1</summary>
#
# What must the pool remember? The slots that are free: a list of offsets. In the beginning it holds
# all of them.
# </details>
# <details><summary>Hint 2</summary>
#
# The offsets are <code>0, size, 2 * size, ...</code>, <code>count</code> of them:
# <code>range(0, count * size, size)</code>.
# </details>
# <details><summary>Hint 3</summary>
#
# <code>take</code> is <code>self.free.pop()</code> if the list is not empty, <code>give</code> is
# <code>self.free.append(offset)</code>.
# </details>


# %% task="pool"
# %%on alice
class Pool:
    """`count` slots of `size` bytes in one region: registered once, handed out many times."""

    def __init__(self, pd, count, size):
        ### BEGIN SOLUTION
        self.mr = MR(pd, count * size, LOCAL)
        self.free = list(range(0, count * size, size))
        ### END SOLUTION

    def take(self):
        ### BEGIN SOLUTION
        return self.free.pop() if self.free else None
        ### END SOLUTION

    def give(self, offset):
        ### BEGIN SOLUTION
        self.free.append(offset)
        ### END SOLUTION


# %% check="pool-once" points=2
# %%on alice
with Context(name=here.device) as ctx, PD(ctx) as pd:
    before, pinned = regions_of_mine(), pinned_now()
    pool, used, keys = Pool(pd, 8, 1024), [], set()
    for _ in range(100):
        used.append(tried(pool.take))
        keys.add(tried(lambda: pool.mr.lkey))
        tried(pool.give, used[-1])
    made, pinned = regions_of_mine() - before, pinned_now() - pinned
came = sum(isinstance(offset, int) for offset in used)
print(f"A pool of 8 slots of 1024 bytes, and a hundred times take() and give(): {came} slots came,")
print(f"`pool.mr` had {len(keys)} different keys, the kernel counts {made} regions more.")
assert made == len(keys) == 1, "One region for the whole pool was expected, made with the pool."
assert came == 100, "A slot that was given back should be there to be taken again."
### BEGIN HIDDEN TESTS
assert pinned in (8192, 12288), "The region should have just count * size bytes."
### END HIDDEN TESTS

# %% check="pool-slots" points=2
# %%on alice
with Context(name=here.device) as ctx, PD(ctx) as pd:
    pool = Pool(pd, 8, 1024)
    slots = [tried(pool.take) for _ in range(9)]
    print("Nine times take() on eight slots of 1024 bytes:", *slots)
    ints = [slot for slot in slots[:8] if isinstance(slot, int)]
    assert len(ints) == 8 and slots[8] is None, "Eight offsets were expected, and then None."
    assert sorted(ints) == list(range(0, 8192, 1024)), "Slots overlap, or leave the region."
    ### BEGIN HIDDEN TESTS
    assert pool.mr.length == 8192, "The region should have just count * size bytes."
    ### END HIDDEN TESTS
    tried(pool.give, 3072)
    again = [tried(pool.take), tried(pool.take)]
print("After give(3072), twice take():", *again)
assert again == [3072, None], "Just the slot that was given back should be there again."

# %% [markdown]
# ### What the pool saves
#
# 200 messages of 1 KiB are made ready, with a region for each, and with your pool.


# %%
# %%on alice
def with_regions(pd, texts):
    """Each message gets a region of its own, for as long as it takes to send it."""
    for text in texts:
        with MR(pd, len(text), LOCAL) as mr:
            mr.write(text, len(text))


def with_pool(pd, texts):
    """All messages go through the slots of one region."""
    pool = Pool(pd, 8, 1024)
    for text in texts:
        slot = pool.take()
        pool.mr.write(text, len(text), slot)
        pool.give(slot)


# %%
# %%on alice
texts, took = [bytes(1024)] * 200, {}
with Context(name=here.device) as ctx, PD(ctx) as pd:
    for way in (with_regions, with_pool) if Pool(pd, 8, 1024).take() is not None else ():
        start = time.perf_counter()
        way(pd, texts)
        took[way.__name__] = (time.perf_counter() - start) * 1e3
        print(f"{way.__name__}: {took[way.__name__]:.1f} ms")
if took:
    print(f"ratio in this run: {took['with_regions'] / took['with_pool']:.0f}")
else:
    print("Your pool hands out no slot yet. Come back here after Task 3.")

# %% [markdown]
# **What happened.** 200 registrations against one. What differs is not only time: each registration
# enters the kernel, pins, and changes the table of a device that all processes share; a slot is an
# entry of a Python list.
#
# The price of a pool: its memory is pinned for as long as it lives, and **rights belong to the
# region, not to the slot**. Give a peer the rkey of a pool, and the peer can reach every slot.

# %% [markdown]
# ## 8 Who hears of which error
#
# Alice now orders things that bob's device should refuse. This is what it checks, for each request
# that comes in, before it touches memory. (*NAK*: negative acknowledgement, a refusal with a reason.)
#
# ![Drawing. A request with rkey, address and length passes four gates. First the queue pair: does it
# allow this operation? If not, it answers with a NAK, invalid request. Then the key: is there a
# region with this key? Then domain and right: is the region in the queue pair's domain, and is the
# right granted? Then the range: does every byte lie inside the region? If not, the answer is a NAK,
# remote access error; not a byte is touched and the queue pair goes to ERR. Behind the four gates,
# the device translates, copies and acknowledges.](images/01_gates.svg)
#
# An error ends the connection: a queue pair that met one is in ERR. So each case gets a connection of
# its own. The next cells are long because there are twelve cases, not because they are difficult:
# each entry prepares one case.

# %%
# %%on alice bob
CASES = [
    "all in order",
    "fetch-and-add, all in order",
    "wrong rkey",
    "region taken back",
    "region of another domain",
    "WRITE, region without WRITE",
    "READ, region without READ",
    "fetch-and-add, region without ATOMIC",
    "queue pair without WRITE",
    "no bytes at all, nonsense rkey",
    "wrong lkey",
    "READ into a region without LOCAL",
]


# %%
# %%on alice bob
def fresh(cases):
    """An end of a connection for each case; those of an earlier run are closed first."""
    for end in globals().get("ends", {}).values():
        end.close()
    return {case: Endpoint() for case in cases}


ends = fresh(CASES)
cards = {case: end.card.as_dict() for case, end in ends.items()}

# %% [markdown]
# The notebook carries the cards from side to side, as in Lab 00.


# %%
def connect():
    """Each host gets the other's cards and connects all its ends."""
    for host, peer in ((lab.alice, lab.bob), (lab.bob, lab.alice)):
        host.put(peers=peer.get("cards"))
        host.run("for case, end in ends.items(): end.connect_card(peers[case])")


connect()

# %% [markdown]
# Bob makes a region for each case, in the domain of that case's queue pair, and tells alice where
# it is: `targets`, the address and the rkey. In three cases what he tells is wrong or out of date.
# From one of his queue pairs he takes a right away, with a call that you have not seen yet: `modify`
# (Lab 02). He also posts one receive on each queue pair, to see what becomes of it.

# %%
# %%on bob
NONE, LOCAL, WRITE = 0, e.IBV_ACCESS_LOCAL_WRITE, e.IBV_ACCESS_REMOTE_WRITE
READ, ATOMIC = e.IBV_ACCESS_REMOTE_READ, e.IBV_ACCESS_REMOTE_ATOMIC
ALL = LOCAL | WRITE | READ | ATOMIC
special = {
    "WRITE, region without WRITE": LOCAL | READ | ATOMIC,
    "READ, region without READ": LOCAL | WRITE | ATOMIC,
    "fetch-and-add, region without ATOMIC": LOCAL | WRITE | READ,
}
regions = {case: MR(ends[case].pd, 64, special.get(case, ALL)) for case in CASES}
regions["region of another domain"] = MR(ends["all in order"].pd, 64, ALL)
for mr in regions.values():
    mr.write((37).to_bytes(8, "little") * 8, 64)
for end in ends.values():
    end.post_recv()

# %%
# %%on bob
from pyverbs.qp import QPAttr

fewer = QPAttr()
fewer.qp_access_flags = READ
ends["queue pair without WRITE"].qp.modify(fewer, e.IBV_QP_ACCESS_FLAGS)

targets = {case: [mr.buf, mr.rkey] for case, mr in regions.items()}
targets["wrong rkey"][1] ^= 1  # the right row, a wrong number
targets["no bytes at all, nonsense rkey"] = [0, 0x12345678]
regions.pop("region taken back").close()

# %% [markdown]
# **Predict**, for each case: how will alice's order end? In which state will bob's queue pair be,
# RTS or ERR? Will bob's *program* be told anything? Write three columns before you go on.

# %%
lab.alice.put(targets=lab.bob.get("targets"))


# %%
# %%on alice
def own_piece(end, length=8, lkey_error=0):
    """The first bytes of this end's own region, as an order names them."""
    return SGE(end.mr.buf, length, end.mr.lkey ^ lkey_error)


opcodes = {case: RDMA_READ if case.startswith("READ") else RDMA_WRITE for case in CASES}
opcodes |= {case: FETCH_ADD for case in CASES if case.startswith("fetch-and-add")}
pieces = {case: own_piece(end) for case, end in ends.items()}
pieces["no bytes at all, nonsense rkey"] = own_piece(ends["no bytes at all, nonsense rkey"], 0)
pieces["wrong lkey"] = own_piece(ends["wrong lkey"], lkey_error=1)
closed = MR(ends["READ into a region without LOCAL"].pd, 64, NONE)
pieces["READ into a region without LOCAL"] = SGE(closed.buf, 8, closed.lkey)

# %%
with lab.capture() as wire:
    lab.alice.run("statuses = {c: post(ends[c], opcodes[c], pieces[c], targets[c]) for c in CASES}")

# %%
# %%on bob
before = (37).to_bytes(8, "little") * 8
changed = {
    case: "as before" if mr.read(64, 0) == before else "changed" for case, mr in regions.items()
}
report = {
    case: [end.state, "flushed" if end.rcq.poll()[0] else "waits", changed.get(case, "gone")]
    for case, end in ends.items()
}

# %%
seen, bobs = lab.alice.get("statuses"), lab.bob.get("report")
print(f"{'case':38}{'alice: her order':18}{'bob: queue pair':17}{'his receive':13}his bytes")
for case, status in seen.items():
    state, receive, touched = bobs[case]
    print(f"{case:38}{status:18}{state:17}{receive:13}{touched}")

# %% [markdown]
# Next, the same table as the InfiniBand specification has it, beside what this device did. Where the
# two are known to differ, the cell accepts both; how many such rows are there?

# %%
ACCESS, LOCAL_ERROR = ("REM_ACCESS_ERR", "ERR"), ("LOC_PROT_ERR", "RTS")
SPECIFICATION = dict.fromkeys(seen, ACCESS) | {
    "all in order": ("SUCCESS", "RTS"),
    "fetch-and-add, all in order": ("SUCCESS", "RTS"),
    "queue pair without WRITE": ("REM_INV_REQ_ERR", "ERR"),
    "no bytes at all, nonsense rkey": ("SUCCESS", "RTS"),
    "wrong lkey": LOCAL_ERROR,
    "READ into a region without LOCAL": LOCAL_ERROR,
}
SOFT_ROCE = {"wrong lkey": ("WR_FLUSH_ERR", "RTS")}
for case, (status, state) in SPECIFICATION.items():
    got = (seen[case], bobs[case][0])
    print(f"{case:38}{status:16}{state:5}", "as here" if got == (status, state) else f"here: {got}")
    assert got in ((status, state), SOFT_ROCE.get(case)), f"neither of the two: {case}"

# %% [markdown]
# This is what crossed the wire meanwhile. **Predict.** Twelve orders: how many requests? Which one is
# missing?

# %%
wire.packets

# %%
requests = wire.count(src="alice", again=False)
naks = [wire.count(syndrome=f"NAK: {why}") for why in ("remote access error", "invalid request")]
print(f"{len(seen)} orders, {requests} requests; NAKs: {naks[0]} for access, {naks[1]} invalid")
assert requests == len(seen) - 1 and naks == [6, 1]

# %% [markdown]
# Read the table once more, by the questions of your prediction:
#
# - **Alice** always gets a completion, and its name says where the fault was found. `REM_…`: the
#   *remote* device refused, with a NAK. `LOC_…`: her own device did, and bob has noticed nothing. The
#   order with the wrong lkey never left. The last READ did, and bob's device answered it in good
#   faith; it was alice's that would not put the answer into a region without LOCAL.
# - For the wrong lkey Soft-RoCE says `WR_FLUSH_ERR` where the specification demands `LOC_PROT_ERR`.
#   So on Soft-RoCE, a flush error with no other error *before* it means: look at your own lkey,
#   address and length.
# - All the reasons behind `REM_ACCESS_ERR` look alike to alice: wrong key, wrong domain, missing
#   right, region gone. Bob's device does not tell a stranger *why*.
# - **Bob's queue pair** goes to ERR with every request that his device refuses: after it, nothing
#   more gets through on this connection. His bytes are as before.
# - **Bob's program** is told nothing directly. It has no completion for an incoming WRITE, good or
#   bad. It notices when a receive that it had posted comes back *flushed* (or by the asynchronous
#   event `IBV_EVENT_QP_ACCESS_ERR`, if somebody listens for it).
# - A request without a byte is not checked: there is nothing to protect.
#
# And the fetch-and-add that was in order? It changes memory *and* brings back what was there before.

# %%
# %%on alice
old = int.from_bytes(ends["fetch-and-add, all in order"].mr.read(8, 0), "little")
print("alice got the old value:", old)
assert old == 37

# %%
# %%on bob
new = int.from_bytes(regions["fetch-and-add, all in order"].read(8, 0), "little")
print("bob has the new one:", new)
assert new == 42

# %% [markdown]
# An atomic operation needs an address that is divisible by 8. **Predict.** Who refuses one that is
# not?

# %%
# %%on alice
end, (address, rkey) = ends["fetch-and-add, all in order"], targets["fetch-and-add, all in order"]
try:
    print("the order ended with", post(end, FETCH_ADD, own_piece(end), [address + 4, rkey]))
except PyverbsRDMAError as error:
    print("not even accepted:", error)

# %% [markdown]
# Soft-RoCE's library looks at the address when the order is posted (`EINVAL`, and the queue pair
# stays usable). By the specification it is the *other* device that refuses, and alice's order ends
# with `REM_INV_REQ_ERR`.

# %% [markdown]
# ## 9 At the edge
#
# Pages are pinned as a whole, but rights end at a **byte**. Bob lays out four pages full of the byte
# `EE` as guards. His region is 4096 bytes long and begins 48 bytes before a page ends, so two pages
# are pinned: twice as much as may be reached.
#
# **Predict.** Which of these five WRITEs gets through? Will the guards hold, in the last one, too,
# where address + length is larger than 64 bits can hold?

# %%
# %%on alice bob
EDGES = {  # bytes from the beginning of the region, how many
    "the last byte": (4095, 1),
    "one byte behind the end": (4096, 1),
    "half inside, half outside": (4095, 2),
    "one byte before the beginning": (-1, 1),
    "around the end of all addresses": (None, 1024),
}
ends = fresh(EDGES)
cards = {case: end.card.as_dict() for case, end in ends.items()}

# %%
connect()

# %%
# %%on bob
ground = allocate(4 * PAGE)
ground[:] = b"\xee" * len(ground)
first = 2 * PAGE - 48
base = address_of(ground) + first
regions = {case: MR(end.pd, 4096, LOCAL | WRITE, base) for case, end in ends.items()}
targets = {
    case: [2**64 - 1024 if offset is None else base + offset, regions[case].rkey]
    for case, (offset, _) in EDGES.items()
}

# %%
lab.alice.put(targets=lab.bob.get("targets"))

# %%
# %%on alice
statuses = {}
for case, (_, length) in EDGES.items():
    end = ends[case]
    end.mr.write(b"\xaa" * length, length)
    statuses[case] = post(end, RDMA_WRITE, own_piece(end, length), targets[case])
    print(f"{case:33}{statuses[case]}")
good = [case for case, status in statuses.items() if status == "SUCCESS"]
assert good == ["the last byte"] and set(statuses.values()) == {"SUCCESS", "REM_ACCESS_ERR"}

# %%
# %%on bob
print("states:", [end.state for end in ends.values()])
last = first + 4095
print("the last byte of the region between its neighbours:", ground[last - 1 : last + 2].hex(" "))
print("bytes that changed:", len(ground) - ground[:].count(0xEE))
assert ground[last] == 0xAA and ground[:].count(0xEE) == len(ground) - 1

# %% [markdown]
# **What happened.** One byte has changed, the one that was allowed. Half an access is no access:
# where a part lies outside, nothing is written, not even the part that lies inside. The first packet
# of a request says how long all of it will be, so the device can refuse before the first byte.

# %% [markdown]
# ### Task 4: a buffer that a peer may read but not write (4 points)
#
# Bob wants to put up a notice: `text`. Every peer who is told where may **read** it; nobody may
# **change** it over the network. Bob himself must be able to.
#
# Make a region of 64 bytes in the domain of bob's queue pair (`desk.pd`), put `text` into it from
# byte 0 on, keep the region in `board`, and put into `notice` what a peer must know: `[address,
# key]`. Which rights the queue pair has is not your concern: it allows everything.
#
# <details><summary>Hint 1</summary>
#
# Which single flag do you need? Look at the table of section 4, and at the combinations that were
# accepted.
# </details>
# <details><summary>Hint 2</summary>
#
# Does bob's program need a right of the device's to write into its own memory? Who checks rights,
# the processor or the device?
# </details>
# <details><summary>Hint 3</summary>
#
# <code>MR(desk.pd, 64, ...)</code>, <code>board.write(text, len(text))</code>, and the key for
# peers is the rkey: <code>[board.buf, board.rkey]</code>.
# </details>

# %%
# %%on alice bob
ends = fresh(["desk"])
desk = ends["desk"]
cards = {"desk": desk.card.as_dict()}
readable = False  # until alice has read the notice

# %%
connect()

# %% task="notice"
# %%on bob
text = b"open from 9 to 17"
board = notice = None  # to become the region, and [address, key]
### BEGIN SOLUTION
board = MR(desk.pd, 64, READ)
board.write(text, len(text))
notice = [board.buf, board.rkey]
### END SOLUTION


# %%
def reconnect():
    """Connect the two queue pairs anew, since an error ends a connection; tell alice where."""
    lab.alice.run("desk.reset()")
    lab.bob.run("desk.reset()")
    connect()
    lab.alice.put(notice=lab.bob.get("notice"))


reconnect()

# %% check="notice-read" points=2
# %%on alice
print("Alice READs 17 bytes from where `notice` says.")
assert isinstance(notice, list) and len(notice) == 2, "`notice` should be [address, key]."
status = post(desk, RDMA_READ, own_piece(desk, 17), notice)
found = desk.mr.read(17, 0)
print(f"The order ended with {status}; her buffer holds {found!r}.")
readable = status == "SUCCESS" and found == b"open from 9 to 17"
assert status != "WR_FLUSH_ERR", (
    "An earlier try has ended the connection: run the cell above again."
)
assert status == "SUCCESS", (
    "Alice could not read. Domain, right, address, key: which one is it? "
    "(On a second try: run all cells from the task's down again.)"
)
assert readable, "She could read, but the text is not there."

# %%
reconnect()

# %% check="notice-write" points=1
# %%on alice
print("This looks whether a peer can overwrite the notice.")
assert readable, "As long as nobody can read the notice, it is no use to protect it."
status = post(desk, RDMA_WRITE, own_piece(desk), notice)
print(f"Alice tried to WRITE 8 bytes into the notice: {status}.")
assert status != "WR_FLUSH_ERR", "The connection had ended: run the cell above, then this again."
assert status == "REM_ACCESS_ERR", "Bob's device should have refused with REM_ACCESS_ERR."

# %%
reconnect()

# %% check="notice-count" points=1
# %%on alice
print("This looks whether a peer can change the notice in another way.")
assert readable, "First make the notice readable; then see whether it can be changed."
status = post(desk, FETCH_ADD, own_piece(desk), notice)
print(f"Alice tried a fetch-and-add on the first 8 bytes of the notice: {status}.")
assert status != "WR_FLUSH_ERR", "The connection had ended: run the cell above, then this again."
assert status == "REM_ACCESS_ERR", "WRITE is not the only operation that changes memory."

# %% [markdown]
# ## 10 Optional: memory without pinning
#
# *On-demand paging* (ODP) turns the bargain of section 1 around: the region pins nothing, and the
# device asks the kernel for a page when it needs one. The driver must support it, and so must the
# card; and a page that is missing makes the operation wait. It is off here because this corner of
# Linux is young for Soft-RoCE: set `try_odp` to `True` to look at it. The cell is folded.

# %% hide="input"
# %%on alice
try_odp = False
if try_odp:
    memory = allocate(32 * MIB)
    with Endpoint() as near, Endpoint() as far:
        near.connect_card(far.card)
        far.connect_card(near.card)
        for name, more in (("on demand", e.IBV_ACCESS_ON_DEMAND), ("pinned", NONE)):
            with MR(near.pd, 32 * MIB, LOCAL | WRITE | more, address_of(memory)) as mr:
                pinned, exist = pinned_now(), pages_that_exist(memory)
                status = post(far, RDMA_WRITE, own_piece(far), (mr.buf, mr.rkey))
            print(
                f"{name:9}: {pinned >> 20} MiB pinned, {exist} pages exist; after a WRITE", end=" "
            )
            print(f"({status}) {pages_that_exist(memory)}")

# %% [markdown]
# ## On hardware
#
# - **The card keeps a cache of its table.** With much registered memory in small pages, the entry for
#   an access may not be there, and the card fetches it over PCIe first (Fragkouli and Vanbever,
#   *Faster Offloads by Unloading them: The RDMA Case*, arXiv 2510.00735, measure what that costs).
#   Huge pages make fewer entries, and registering faster (Mietke et al., *Analysis of the Memory
#   Registration Process in the Mellanox InfiniBand Software Stack*, Euro-Par 2006).
# - **How long it takes.** 500 GB of memory that existed already: 49 s in one thread, 12 s in several,
#   so some 0.1 s for a GB (reported by a developer of the Mooncake store, with his test,
#   [pull request 855](https://github.com/kvcache-ai/Mooncake/pull/855), 2025). Large programs start
#   in minutes instead of seconds for it (Shen et al., *NP-RDMA: Using Commodity RDMA without Pinning
#   Memory*, arXiv 2310.11062, 2023).
# - **Register or copy** is an old question: Frey and Alonso, *Minimizing the Hidden Cost of RDMA*,
#   ICDCS 2009, measure it.
# - **Keys can be guessed** on some devices: Rothenberger et al., *ReDMArk: Bypassing RDMA Security
#   Mechanisms*, USENIX Security 2021, list predictable rkeys, one domain for all connections, and
#   packets without encryption among the weaknesses that they exploit.
# - **On-demand paging** is described by Lesokhin et al., *Page Fault Support for Network
#   Controllers* (ASPLOS 2017). Fukuoka, Sato and Taura, *Pitfalls of InfiniBand with On-Demand
#   Paging* (ISPASS 2021) found waits 3 to 4 orders of magnitude longer than a common page fault.
# - **More flags.** `IBV_ACCESS_RELAXED_ORDERING` lets a card write in any order, and
#   `ibv_reg_dmabuf_mr` registers memory of another device, such as a GPU (`ibv_reg_mr(3)`).
#
# ## What this does not show
#
# - A translation cache and its misses: Soft-RoCE's table lies in ordinary memory, and the processor
#   walks it. Thousands of regions cost it nothing that you could measure here.
# - What registering costs with a card, which has to be told, too. The shape (a fixed price, and one
#   for each page) is the same.
# - That DMA really goes past the processor: here the processor copies every byte, and the kernel
#   could as well use your page table. Soft-RoCE pins all the same, because the interface promises
#   it.
# - An IOMMU, a second table between device and memory, which many servers have.

# %% [markdown]
# ## Food for thought
#
# 1. A server gives each of 1,000 clients a slot of 4 KiB in one region. What can client 7 do to the
#    slot of client 8? Name two ways to prevent it, and what each costs.
# 2. A registration cache keeps regions after use. What happens if the program frees the buffer, gets
#    the same address again for something else, and the cache finds it?
# 3. `VmPin` counts the same page twice, for two regions. Why is that easier for the kernel than
#    counting pages? Whom does it hurt?
# 4. A `REM_ACCESS_ERR` ends the connection. Why is that a good idea, when the request could simply be
#    ignored?
#
# ## Troubleshooting
#
# On a host, `from rdmalab.statuses import explain` and `print(explain("REM_ACCESS_ERR"))` tell of any
# completion status what it means and where to look.
#
# | symptom | likely cause | do |
# |:--|:--|:--|
# | registering: `EINVAL` | remote write or atomic without local write | section 4 |
# | registering: `ENOMEM` | the limit for pinned memory | `!ulimit -l`; `VmPin` of the process; section 5 |
# | registering: `EFAULT` | the address range is not (all) mapped, or read-only | look at address and length |
# | `REM_ACCESS_ERR` | key, domain, right or range at the *peer* | compare address and rkey with what the peer has now; section 8 |
# | `REM_INV_REQ_ERR` | the peer's *queue pair* lacks the right; on cards also a misaligned atomic | the peer's `qp_access_flags` |
# | `LOC_PROT_ERR`, or a lone `WR_FLUSH_ERR` on Soft-RoCE | own lkey, own range, or no local write where data should arrive | the SGE of the order |
# | `WR_FLUSH_ERR` after another error | the queue pair is in ERR since then | look at the *first* error |
# | received data are wrong | buffer given back, or used again, before the completion | keep it until the completion |
# | `NameError` on a host | its kernel was restarted, or cells were left out | run again from the start |
#
# ## Further reading
#
# - `ibv_reg_mr(3)`, `ibv_alloc_pd(3)`, `setrlimit(2)`, `proc_pid_status(5)`, `rdma-resource(8)`.
# - InfiniBand Trade Association, *InfiniBand Architecture Specification*, Volume 1: chapter 10
#   (memory management, protection domains) and 11.6.2 (completion return status).
# - D. Barak, [*ibv_poll_cq()*](http://www.rdmamojo.com/2013/02/15/ibv_poll_cq/): every completion
#   status with its usual causes.
# - Linux: `drivers/infiniband/core/umem.c` pins, `drivers/infiniband/sw/rxe/rxe_mr.c` is Soft-RoCE's
#   table of regions, a few hundred lines.
#
# **Next lab:** 02, *Walk a queue pair through its states*.

# %% [markdown]
# ## Clean up
#
# The hosts go on running for the next lab; `lab.down()` stops them.

# %%
# %%on alice bob
for end in globals().get("ends", {}).values():
    end.close()
