# %% [markdown]
# # Lab 02: Walk a queue pair through its states
#
# Bring a connection up by hand, move by move, as every RDMA program does somewhere; then break it,
# read what is left, and bring it up again.
#
# ![Drawing. Alice and bob each have a queue pair with a send queue and a receive queue, and a card
# with GID, queue pair number, first packet number and MTU. First they meet: over a TCP socket each
# card goes to the other side once. Then they talk: RoCEv2 packets go from queue pair to queue
# pair.](images/02_two_queue_pairs.svg)
#
# | | |
# |:--|:--|
# | **You will do** | make all moves from RESET to RTS by hand; try every other move; break and repair a connection; diagnose four that do not come up |
# | **You will learn** | what each state means and each move requires; what `EINVAL` hides; flushing, and why old completions outlive a reset; what `rdma_cm` does for you |
# | **You need** | 90 minutes, 700 MB of free memory, any backend |
# | **Before this** | Lab 00; Lab 01 helps |

# %% [markdown]
# ## Start

# %%
# %load_ext rdmalab
import rdmalab

lab = rdmalab.up()
# %hosts

# %% [markdown]
# ## 1 A queue pair that knows nothing
#
# A TCP socket has states too, but the kernel moves it: `connect()`, and you are connected. A
# **queue pair** is moved by your program, one state at a time, and each move hands the device a
# few more facts. Nothing is sent for it: no packet tells the peer. That is why both sides must do
# their part, and why most of the errors that people meet in their first week live here.
#
# First the objects that Lab 00 has shown, and no queue pair yet.

# %%
# %%on alice bob
import contextlib
import errno
import json
import random
import socket
import subprocess
import time

import pyverbs.enums as e
from pyverbs.addr import GID, AHAttr, GlobalRoute
from pyverbs.cq import CQ
from pyverbs.device import Context

# %%
# %%on alice bob
from pyverbs.mr import MR
from pyverbs.pd import PD
from pyverbs.pyverbs_error import PyverbsRDMAError
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
from pyverbs.wr import SGE, RecvWR, SendWR

from rdmalab import here
from rdmalab.qpstate import MOVES, REQUIRED, STATES, attributes_in_words

other = "bob" if here.name == "alice" else "alice"


# %%
# %%on alice bob
def close_all():
    """Close what this lab has opened on this host, newest first."""
    for name in ("caller", "listener", "line", "qp", "far", "mr", "sent", "arrived", "pd", "ctx"):
        if name in globals():
            globals().pop(name).close()


# %%
# %%on alice bob
close_all()  # what an earlier run of the lab has left
ctx = Context(name=here.device)
pd = PD(ctx)
sent, arrived = CQ(ctx, 64), CQ(ctx, 64)
mr = MR(pd, 8192, e.IBV_ACCESS_LOCAL_WRITE | e.IBV_ACCESS_REMOTE_WRITE)
room = QPCap(max_send_wr=16, max_recv_wr=16, max_send_sge=1, max_recv_sge=1)
kind = QPInitAttr(qp_type=e.IBV_QPT_RC, scq=sent, rcq=arrived, cap=room)


# %%
# %%on alice bob
gid_index = here.gid_index  # looked up by the GID's value, as in Lab 00
own_gid = ctx.query_gid(here.port, gid_index).gid


def status(done):
    """A completion's status by name."""
    return e.ibv_wc_status(done.status).name.removeprefix("IBV_WC_") if done else "no completion"


# %%
# %%on alice bob
def drain(*queues):
    """Empty completion queues. What was in them: the number of each order, and its status."""
    found = []
    for queue in queues:
        while (polled := queue.poll())[0]:
            found += [(done.wr_id, status(done)) for done in polled[1]]
    return found


# %%
# %%on alice bob
def fresh():
    """Put a new queue pair in place of the old one, and empty the completion queues."""
    if "qp" in globals():
        globals().pop("qp").close()
    drain(sent, arrived)
    return QP(pd, kind)


# %% [markdown]
# Two ways to ask for a state: `ibv_query_qp`, which asks the device on behalf of your program, and
# `rdma resource show qp`, which any user can run to see all queue pairs of a device.
#
# **Predict.** `QP(pd, kind)` makes a queue pair. pyverbs takes a third argument, attributes:
# `QP(pd, kind, attr)`. In which state is each of the two?


# %%
# %%on alice bob
def state(qp):
    """The state of `qp`: the device is asked, through ibv_query_qp."""
    attr, _ = qp.query(e.IBV_QP_STATE)
    return e.ibv_qp_state(attr.qp_state).name.removeprefix("IBV_QPS_")


def shown(qp):
    """The state of `qp` that `rdma resource show qp` prints."""
    command = ["rdma", "-j", "resource", "show", "qp", "link", here.device]
    rows = json.loads(subprocess.check_output(command))
    return next(row["state"] for row in rows if row["lqpn"] == qp.qp_num)


# %%
# %%on alice
with QP(pd, kind, QPAttr(port_num=here.port)) as hurried:
    print("with attributes:", state(hurried))

qp = fresh()
print("without:        ", state(qp))
# !rdma resource show qp link {here.device}

# %% [markdown]
# **What happened.** A new queue pair is in RESET: it knows nothing, and does nothing. pyverbs'
# constructor with attributes makes the first move for you and hands you a queue pair in INIT.
# (C programs have no such constructor.) In this lab you make the moves yourself, so we leave the
# attributes out.
#
# `rdma resource` lists `lqpn`, the local number, and `rqpn`, the peer's (none yet). Queue pair 1, of
# the type GSI, is the kernel's own; you will meet it again in section 10.

# %% [markdown]
# ## 2 A move is one call
#
# ![Drawing of the states. A row from left to right: RESET, INIT, RTR, RTS. RESET to INIT requires
# PKEY_INDEX, PORT and ACCESS_FLAGS. INIT to RTR requires AV, PATH_MTU, DEST_QPN, RQ_PSN,
# MAX_DEST_RD_ATOMIC and MIN_RNR_TIMER. RTR to RTS requires SQ_PSN, TIMEOUT, RETRY_CNT, RNR_RETRY and
# MAX_QP_RD_ATOMIC. From RTS a program can move to SQD, the drained send queue, and back. From every
# state but RESET it can move to ERR, from every state to RESET. The device itself moves from RTR and
# RTS to ERR when an order fails; on UC and UD from RTS to SQE, out of which a program moves back to
# RTS.](images/02_states.svg)
#
# One call makes all moves: `qp.modify(attr, mask)`. `attr` is a form with some twenty fields, the
# state that you want among them. `mask` has one bit for each field and says **which fields count**.
#
# **Predict.** We fill in the state that we want, INIT, and set its bit. What does the kernel say?

# %%
# %%on alice
attr = QPAttr()
attr.qp_state = e.IBV_QPS_INIT
try:
    qp.modify(attr, e.IBV_QP_STATE)
except PyverbsRDMAError as error:
    print("refused:", errno.errorcode[error.error_code])
print("state:", state(qp))

# %% [markdown]
# **What happened.** `EINVAL`, "invalid argument": something is wrong, and nobody says what. The
# queue pair is where it was; a move is made wholly or not at all. The kernel holds each move
# against a table: these bits must be set, those may be, all others must not. The part of it that
# you need is in `ibv_modify_qp(3)`, and here:

# %%
# %%on alice
print("RESET to INIT requires, besides IBV_QP_STATE:")
print(attributes_in_words(MOVES["RESET", "INIT"].required))


# %%
# %%on alice bob
def attempt(function, *args):
    """Call `function`. The name of the error when it is refused, else an empty text."""
    try:
        function(*args)
    except PyverbsRDMAError as error:
        return errno.errorcode[error.error_code]
    except OSError as error:  # of a socket
        return type(error).__name__
    return ""


# %% [markdown]
# ### Task 1: RESET to INIT (2 points)
#
# Complete `to_init`. `rights` is what the peer may do with our memory through this queue pair, such
# as `e.IBV_ACCESS_REMOTE_WRITE`. A partition (*P_Key*) is to InfiniBand what a VLAN is to Ethernet; on
# RoCE it is always the one at index 0. Run the cell, then the checks under it.
#
# <details><summary>Hint 1</summary>
#
# Four fields of `attr` and four bits of the mask: the state, and the three that the table lists. The
# table's first column is the bit, its second the field.
# </details>
# <details><summary>Hint 2</summary>
#
# Bits are joined with `|`: `mask = e.IBV_QP_STATE | e.IBV_QP_PORT | ...`. The port is `here.port`.
# </details>
# <details><summary>Hint 3</summary>
#
# `attr.qp_state, attr.pkey_index = e.IBV_QPS_INIT, 0`, then `attr.port_num` and
# `attr.qp_access_flags`; at last `qp.modify(attr, mask)`.
# </details>


# %% task="to-init"
# %%on alice bob
def to_init(qp, rights):
    """Move `qp` from RESET to INIT; the peer may do `rights` with our memory."""
    attr = QPAttr()
    ### BEGIN SOLUTION
    attr.qp_state, attr.pkey_index = e.IBV_QPS_INIT, 0
    attr.port_num, attr.qp_access_flags = here.port, rights
    mask = e.IBV_QP_STATE | e.IBV_QP_PKEY_INDEX | e.IBV_QP_PORT | e.IBV_QP_ACCESS_FLAGS
    qp.modify(attr, mask)
    ### END SOLUTION


# %% check="to-init-state" points=1
# %%on alice
with QP(pd, kind) as new:
    said = attempt(to_init, new, e.IBV_ACCESS_REMOTE_WRITE)
    now, listed = state(new), shown(new)
print(f"I called to_init on a queue pair in RESET. The kernel refused: {said or 'no'}.")
print(f"It is in {now} now; `rdma resource show qp` says {listed}.")
assert not said, "Refused: hold your mask against the table, bit by bit. None too few, none more."
assert listed == "INIT", "It should be in INIT: did you call `modify`, and with which state?"

# %% check="to-init-rights" points=1
# %%on alice
rights = (e.IBV_ACCESS_REMOTE_WRITE, e.IBV_ACCESS_REMOTE_READ, 0)
found = []
for wanted in rights:
    with QP(pd, kind) as another:
        attempt(to_init, another, wanted)
        attr, _ = another.query(e.IBV_QP_ACCESS_FLAGS | e.IBV_QP_PORT)
        found.append((attr.qp_access_flags, attr.port_num))
print(f"Asked for the rights {[int(wanted) for wanted in rights]} on port {here.port},")
print(f"three queue pairs hold (rights, port): {found}.")
right = [(int(wanted), here.port) for wanted in rights]
assert found == right, "The rights that the caller asks for, and our port, are not what it holds."

# %% [markdown]
# ## 3 Who is my peer?
#
# The next move must tell the device who its peer is. So the two programs have to meet first, over
# something that is not RDMA. `ib_write_bw`, `ibv_rc_pingpong` and most other programs use a plain
# TCP socket for it.
#
# **Predict.** What must a card hold, so that the peer can send to this queue pair? Which of it
# could the peer guess?


# %%
# %%on alice bob
def make_card(qp):
    """What the peer must know to talk with `qp`."""
    return {
        "gid": own_gid,  # which host
        "qp_num": qp.qp_num,  # which queue pair on it
        "psn": random.getrandbits(24),  # the number of the first packet that it will send
        "mtu": int(ctx.query_port(here.port).active_mtu),  # a code: 3 is 1024 bytes, 5 is 4096
    }


qp = fresh()
mine = make_card(qp)
print(here.name, mine)

# %% [markdown]
# The packet number (*PSN*) is drawn at random, as TCP does it, so that late packets of an earlier
# connection do not fit into this one. Lab 00 had a fixed 1000, so that you could find it.
#
# Now two sockets. One side has to wait for the other; both run the same code, so the names decide.

# %%
# %%on alice bob
PORT = 18515  # any free one, as long as both agree


def dial(other, seconds=5):
    """A TCP connection to `other`; the host whose name comes first waits for the call."""
    if here.name < other:
        with socket.create_server(("", PORT)) as door:
            door.settimeout(seconds)
            return door.accept()[0]
    for _ in range(seconds * 50):
        with contextlib.suppress(ConnectionRefusedError):  # nobody waits there yet
            return socket.create_connection((here.peers[other], PORT), seconds)
        time.sleep(0.02)
    raise TimeoutError(f"{other} does not answer on port {PORT}")


# %%
# %%on alice bob
def swap(mine, other):
    """Send `mine` to `other` and return what it sends. Both call it at the same time."""
    with dial(other) as line, line.makefile("rw") as text:
        line.settimeout(5)
        print(json.dumps(mine), file=text, flush=True)
        return json.loads(text.readline())


peer = swap(mine, other)
print(here.name, "got", peer)

# %% [markdown]
# **What happened.** Each side has the other's card: four numbers, once, before any RDMA. As JSON
# they cannot be mistaken. Programs in C often send raw structures, and the classic accident is a
# 64-bit address put through `htonl`, which knows 32 bits.
#
# Nothing here is secret or signed: who can talk to that TCP port can hand you any card.

# %% [markdown]
# ## 4 INIT to RTR: knowing the peer

# %%
# %%on alice
print("INIT to RTR requires, besides IBV_QP_STATE:")
print(attributes_in_words(MOVES["INIT", "RTR"].required))

# %% [markdown]
# `AV` is the *address vector*, the way to the peer: `AHAttr(gr=route, is_global=1, port_num=...)`
# with `route = GlobalRoute(dgid=GID(...), sgid_index=...)`, as in Lab 00. `is_global=1` says that
# there is a route at all (a *GRH*, global routing header). On RoCE there always must be.
#
# **Predict.** Of all moves this one alone may take long, and fail because of the *network*. Why? And
# what will it say about a peer at `10.0.0.200`, where nobody lives?


# %%
# %%on alice
def lone_way(gid, sgid_index):
    """How the move to RTR ends, with this way to the peer; as text, with the time it took."""
    route = GlobalRoute(dgid=GID(gid), sgid_index=sgid_index)
    attr = QPAttr(port_num=here.port)
    attr.path_mtu, attr.dest_qp_num, attr.rq_psn, attr.max_dest_rd_atomic = 3, 17, 0, 1
    attr.ah_attr = AHAttr(gr=route, is_global=1, port_num=here.port)
    with QP(pd, kind, attr) as trial:  # in INIT
        begin = time.monotonic()
        said = attempt(trial.to_rtr, attr)  # pyverbs sets state and mask for the move
        return f"{said or 'moved'} after {time.monotonic() - begin:.3f} s"


print("bob:", lone_way(peer["gid"], gid_index))
print("nobody:", lone_way(peer["gid"][:-4] + "00c8", gid_index))


# %%
# %%on alice
table = {entry.gid_index: entry.gid_str() for entry in ctx.query_gid_table(64)}
print("our GIDs:", table)
wrong_family = next(index for index, gid in table.items() if gid.startswith("fe80"))
print(f"our GID {wrong_family}, bob's address:", lone_way(peer["gid"], wrong_family))
print("our GID 200:", lone_way(peer["gid"], 200))

# %% [markdown]
# **What happened.** The device must know the peer's Ethernet address, so the kernel asks the network
# for it (ARP) inside your `modify`, and waits. For bob that is quick. For an address where nobody
# lives it gives up after a second or so with `ETIMEDOUT`: on a real network this is a peer that is
# down, a cable, a wrong subnet. For once an errno that says what is wrong.
#
# The other two are our own end. A link-local IPv6 GID cannot reach an IPv4 one: `EINVAL` again. A
# row of the table that is empty: `ENODATA`. This is why Lab 00 looked the index up **by value**.
#
# The next cell is folded. It brings a queue pair to RTS in one go, as Lab 00 did, and later sections
# use it, so that they work whether or not you have solved the tasks. It holds what you are about to
# write, so leave it closed for now.


# %% hide="input"
# %%on alice bob
def everything(mine, peer):
    """All attributes of all moves, for pyverbs' to_init, to_rtr and to_rts."""
    attr = QPAttr(port_num=here.port)
    attr.qp_access_flags = e.IBV_ACCESS_REMOTE_WRITE
    attr.path_mtu = min(mine["mtu"], peer["mtu"])
    attr.dest_qp_num, attr.rq_psn, attr.sq_psn = peer["qp_num"], peer["psn"], mine["psn"]
    route = GlobalRoute(dgid=GID(peer["gid"]), sgid_index=gid_index)
    attr.ah_attr = AHAttr(gr=route, is_global=1, port_num=here.port)
    attr.timeout, attr.retry_cnt = 14, 3
    attr.min_rnr_timer, attr.rnr_retry = 12, 6
    attr.max_rd_atomic = attr.max_dest_rd_atomic = 1
    return attr


# %% [markdown]
# ### Task 2: INIT to RTR (3 points)
#
# Complete `to_rtr`. `mine` and `peer` are cards. The path MTU is the smaller of the two. Let the peer
# have one READ or atomic under way at a time (`max_dest_rd_atomic`), and let it wait 0.64 ms, code
# 12, when it finds no receive (`min_rnr_timer`).
#
# <details><summary>Hint 1</summary>
#
# Seven fields, seven bits. `rq_psn` is the number that *arriving* packets begin with. Who has chosen
# it?
# </details>
# <details><summary>Hint 2</summary>
#
# The way to the peer needs two GIDs: the peer's by value, `GID(peer["gid"])`, and ours by index,
# `gid_index`.
# </details>
# <details><summary>Hint 3</summary>
#
# `attr.dest_qp_num, attr.rq_psn = peer["qp_num"], peer["psn"]`, and `attr.ah_attr` as in `lone_way`
# above. The bits: STATE, AV, PATH_MTU, DEST_QPN, RQ_PSN, MAX_DEST_RD_ATOMIC, MIN_RNR_TIMER.
# </details>


# %% task="to-rtr"
# %%on alice bob
def to_rtr(qp, mine, peer):
    """Move `qp` from INIT to RTR: from now on it answers the queue pair of the card `peer`."""
    attr = QPAttr()
    ### BEGIN SOLUTION
    attr.qp_state, attr.path_mtu = e.IBV_QPS_RTR, min(mine["mtu"], peer["mtu"])
    attr.dest_qp_num, attr.rq_psn = peer["qp_num"], peer["psn"]
    attr.max_dest_rd_atomic, attr.min_rnr_timer = 1, 12
    route = GlobalRoute(dgid=GID(peer["gid"]), sgid_index=gid_index)
    attr.ah_attr = AHAttr(gr=route, is_global=1, port_num=here.port)
    mask = e.IBV_QP_STATE | e.IBV_QP_AV | e.IBV_QP_PATH_MTU | e.IBV_QP_DEST_QPN
    mask |= e.IBV_QP_RQ_PSN | e.IBV_QP_MAX_DEST_RD_ATOMIC | e.IBV_QP_MIN_RNR_TIMER
    qp.modify(attr, mask)
    ### END SOLUTION


# %%
# %%on alice bob
qp = fresh()  # for each try a new one, in INIT
mine = make_card(qp)
peer = swap(mine, other)
qp.to_init(everything(mine, peer))

# %% check="to-rtr-state" points=1
# %%on alice
old = state(qp)
assert old == "INIT", (
    f"It is in {old}, from before: run the cell above this check again, then this."
)
said = attempt(to_rtr, qp, mine, peer)
print(f"I called to_rtr on a queue pair in INIT. The kernel refused: {said or 'no'}.")
print(f"`rdma resource show qp` says {shown(qp)}.")
assert said != "ETIMEDOUT", "Nobody answered at that address: whose GID is the destination?"
assert said != "ENODATA", "Our GID table has nothing in that row: which one is ours?"
assert not said, "Refused: is the mask right, the MTU a code? Is there a route, with our own GID?"
assert shown(qp) != "INIT", "Still in INIT: `modify` makes the move; RTR is the state to ask for."
assert shown(qp) == "RTR", "RTR was asked for, and nothing beyond it: one `modify`, one move."

# %% check="to-rtr-peer" points=1
# %%on alice
with QP(pd, kind, QPAttr(port_num=here.port)) as another:  # in INIT
    attempt(to_rtr, another, mine, peer)
    attr, _ = another.query(e.IBV_QP_AV | e.IBV_QP_DEST_QPN | e.IBV_QP_RQ_PSN | e.IBV_QP_PATH_MTU)
way = attr.ah_attr.dgid if attr.ah_attr.is_global else None
holds = {"gid": way, "qp_num": attr.dest_qp_num, "psn": attr.rq_psn, "mtu": int(attr.path_mtu)}
print(f"A queue pair that you have moved knows its peer as {holds}; bob's card is {peer}.")
wrong = [name for name in holds if holds[name] != peer[name]]
assert not wrong, f"{', '.join(wrong)}: not as bob has it. (Whose packets does this side receive?)"
### BEGIN HIDDEN TESTS
low = {**peer, "mtu": int(e.IBV_MTU_512)}
with QP(pd, kind, QPAttr(port_num=here.port)) as another:
    attempt(to_rtr, another, mine, low)
    found = another.query(e.IBV_QP_PATH_MTU)[0].path_mtu
assert found == e.IBV_MTU_512, "A peer with an MTU of 512 needs packets of at most 512 bytes."
### END HIDDEN TESTS
assert attr.path_mtu <= mine["mtu"], "The path MTU is larger than our own device can take."

# %% [markdown]
# RTR means ready to *receive*. Alice posts a receive; bob, brought to RTS by the folded cell, sends
# 3,000 bytes. Alice's queue pair stays in RTR.


# %%
# %%on alice bob
def post_recv(qp, wr_id=0, place=4096):
    """Order: put the next message at byte `place`."""
    qp.post_recv(RecvWR(wr_id=wr_id, num_sge=1, sg=[SGE(mr.buf + place, 4096, mr.lkey)]))


def post_send(qp, data, wr_id=0):
    """Order: send `data` from byte 0 on."""
    mr.write(data, len(data), 0)
    piece = SGE(mr.buf, len(data), mr.lkey)
    qp.post_send(SendWR(wr_id=wr_id, opcode=e.IBV_WR_SEND, num_sge=1, sg=[piece]))


# %%
# %%on alice bob
def wait(queue, seconds=2):
    """The next completion in `queue`, or None when none comes within `seconds`."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        count, completions = queue.poll()
        if count:
            return completions[0]
        time.sleep(0.0002)  # let others run: the device is software
    return None


# %%
# %%on alice
mr.write(bytes(mr.length), mr.length)
post_recv(qp)

# %%
# %%on bob
qp.to_rts(everything(mine, peer))
post_send(qp, b"hello alice " * 250)
print("bob's order:", status(wait(sent)))

# %% check="to-rtr-bytes" points=1
# %%on alice
done = wait(arrived, 0.5)
found = mr.read(3000, 4096)
print(f"I looked for bob's message: {status(done)}; the first bytes of the place: {found[:12]!r}.")
print(f"Alice's queue pair is in {shown(qp)}.")
assert status(done) == "SUCCESS" and found == b"hello alice " * 250, (
    "Bob's 3,000 bytes are not there. (On a second try: run all cells from the task's down again.)"
)
assert shown(qp) == "RTR", "They came, but RTR is enough to receive: this queue pair moved on."

# %% [markdown]
# ## 5 RTR to RTS: ready to send
#
# Alice could receive, and her device has acknowledged. To *send*, it must know what to do when
# nothing comes back.

# %%
# %%on alice
print("RTR to RTS requires, besides IBV_QP_STATE:")
print(attributes_in_words(MOVES["RTR", "RTS"].required))
for timeout in (0, 8, 14, 20):
    print(
        f"timeout={timeout:2}:", "for ever" if not timeout else f"{4.096 * 2**timeout / 1e3:.0f} ms"
    )

# %% [markdown]
# With `timeout=14` and `retry_cnt=6` a dead peer is noticed after about 7 x 67 ms, half a second.
# That is the *least*: by the specification a device may wait up to four times as long. Two codes mean
# "for ever", and a program that uses them hangs when its peer dies: `timeout=0`, and `rnr_retry=7`.
# (On Soft-RoCE, against the specification, `retry_cnt=7` is a third.)

# %% [markdown]
# ### Task 3: RTR to RTS (2 points)
#
# Complete `to_rts` with `timeout` 14, `retry_cnt` 6, `rnr_retry` 6, and one READ or atomic under way.
#
# <details><summary>Hint 1</summary>
#
# Six fields, six bits. The packet number is that of the packets that *we* send.
# </details>
# <details><summary>Hint 2</summary>
#
# `IBV_QP_MAX_QP_RD_ATOMIC` belongs to the field `max_rd_atomic`. (`max_dest_rd_atomic` was the other
# direction.)
# </details>
# <details><summary>Hint 3</summary>
#
# `attr.sq_psn = mine["psn"]`; the bits are STATE, TIMEOUT, RETRY_CNT, RNR_RETRY, SQ_PSN and
# MAX_QP_RD_ATOMIC.
# </details>


# %% task="to-rts"
# %%on alice bob
def to_rts(qp, mine):
    """Move `qp` from RTR to RTS: from now on it may send, with the numbers of the card `mine`."""
    attr = QPAttr()
    ### BEGIN SOLUTION
    attr.qp_state, attr.sq_psn = e.IBV_QPS_RTS, mine["psn"]
    attr.timeout, attr.retry_cnt, attr.rnr_retry, attr.max_rd_atomic = 14, 6, 6, 1
    mask = e.IBV_QP_STATE | e.IBV_QP_TIMEOUT | e.IBV_QP_RETRY_CNT | e.IBV_QP_RNR_RETRY
    mask |= e.IBV_QP_SQ_PSN | e.IBV_QP_MAX_QP_RD_ATOMIC
    qp.modify(attr, mask)
    ### END SOLUTION


# %%
# %%on alice bob
qp = fresh()  # for each try a new one, in RTR
mine = make_card(qp)
peer = swap(mine, other)
qp.to_rtr(everything(mine, peer))
mr.write(bytes(mr.length), mr.length)
post_recv(qp)

# %% check="to-rts-state" points=1
# %%on alice
old = state(qp)
assert old == "RTR", f"It is in {old}, from before: run the cell above this check again, then this."
said = attempt(to_rts, qp, mine)
attr, _ = qp.query(e.IBV_QP_TIMEOUT | e.IBV_QP_RETRY_CNT | e.IBV_QP_RNR_RETRY | e.IBV_QP_SQ_PSN)
holds = (attr.timeout, attr.retry_cnt, attr.rnr_retry, attr.max_rd_atomic)
print(f"I called to_rts on a queue pair in RTR. The kernel refused: {said or 'no'}.")
print(f"`rdma resource show qp` says {shown(qp)}; timeout, retry_cnt, rnr_retry and")
print(f"max_rd_atomic are {holds}.")
assert not said, "Refused: hold your mask against the table above, bit by bit."
assert shown(qp) == "RTS", "Not in RTS yet: one more `modify`, with the six fields and bits."
assert holds == (14, 6, 6, 1), "Timers and counters are not as asked for."

# %%
# %%on alice
if state(qp) == "RTS":
    post_send(qp, b"hello bob, from RTS")
    print("alice's order:", status(wait(sent)))
else:
    print("Alice is not in RTS, so she sends nothing.")

# %% check="to-rts-bytes" points=1
# %%on bob
done = wait(arrived, 0.5)
found = mr.read(19, 4096)
print(f"I looked for alice's message at bob's: {status(done)}, {found!r}.")
assert done and found == b"hello bob, from RTS", (
    "It did not come. Is alice in RTS? Which number does bob expect on it? "
    "(On a second try: run all cells from the task's down again.)"
)

# %% [markdown]
# ### Task 4: connect (3 points)
#
# Put the pieces together. `connect(qp, other)` takes a queue pair in RESET and the other host's
# name, and both hosts call it at the same time. When it returns the peer's card, **both** sides must
# be able to send at once: the peer's queue pair is at least in RTR. Allow the peer to write.
#
# <details><summary>Hint 1</summary>
#
# A card can only be made when there is a queue pair; RTR needs the peer's card. So: card, swap, three
# moves.
# </details>
# <details><summary>Hint 2</summary>
#
# How do you know when the *peer* has made its moves? Only it knows. `swap` takes anything that JSON
# can carry, and waits for the other side.
# </details>
# <details><summary>Hint 3</summary>
#
# After the moves, `swap("ready", other)`.
# </details>


# %% task="connect"
# %%on alice bob
def connect(qp, other):
    """Bring `qp` from RESET to RTS, with `other`'s as its peer; return the peer's card."""
    mine, peer = make_card(qp), None
    ### BEGIN SOLUTION
    peer = swap(mine, other)
    to_init(qp, e.IBV_ACCESS_REMOTE_WRITE)
    to_rtr(qp, mine, peer)
    to_rts(qp, mine)
    swap("ready", other)
    ### END SOLUTION
    return peer


# %% check="connect-state" points=1
# %%on alice bob
qp, got = fresh(), []
said = attempt(lambda: got.append(connect(qp, other)))
print(
    f"I called connect on both hosts. Error on {here.name}: {said or 'none'}; state: {shown(qp)}."
)
assert not said, f"{said}: a move that was refused, or a swap that only one side has made?"
assert shown(qp) == "RTS", "It has not come to RTS: which moves have been made, in which order?"
print(f"It returned {got[0]}.")
assert isinstance(got[0], dict) and got[0].get("gid") == peer["gid"], "That is not the peer's card."

# %% check="connect-bytes" points=1
# %%on alice bob
drain(sent, arrived)
mr.write(bytes(mr.length), mr.length)
if state(qp) == "RTS":
    post_recv(qp)
    attempt(swap, "receive posted", other)
    post_send(qp, f"hello {other}".encode())
done = wait(arrived, 1)
expected = f"hello {here.name}".encode()
found = mr.read(len(expected), 4096)
print(f"I looked for {other}'s message on {here.name}: {status(done)}, {found!r}.")
assert found == expected, (
    "The message is not there: has each side the card that the other has sent?"
)


# %% [markdown]
# The last point is about *when*. Bob is made slow now, as on a busy host, and alice sends as soon as
# her `connect` returns. How often does her device have to send its one packet?
#
# And its number must be the one that bob expects. A number *behind* that one would be worse than any
# other: his device takes the packet for a repeated one, acknowledges it and does nothing. Alice would
# see a success.


# %%
# %%on alice bob
def slowed(qp):
    """Make the moves of `qp` late, as on a host that is busy."""

    def late(move):
        def wait_and_move(*args):
            time.sleep(0.15)
            return move(*args)

        return wait_and_move

    qp.modify, qp.to_init = late(qp.modify), late(qp.to_init)
    return qp


# %%
# %%on alice bob
def write_nothing(qp):
    """Order: an RDMA WRITE of no bytes. One packet, and no receive is needed for it."""
    piece = SGE(mr.buf, 0, mr.lkey)
    qp.post_send(SendWR(opcode=e.IBV_WR_RDMA_WRITE, num_sge=1, sg=[piece]))


def packets_sent():
    """How many packets this host's device has sent so far."""
    command = ["rdma", "-j", "statistic", "show", "link", f"{here.device}/{here.port}"]
    return json.loads(subprocess.check_output(command))[0]["sent_pkts"]


# %%
# %%on alice bob
def next_numbers(qp):
    """The number of alice's next packet to bob: as this host counts, and as the other does."""
    attempt(swap, "alice is done", other)
    attr, _ = qp.query(e.IBV_QP_SQ_PSN | e.IBV_QP_RQ_PSN)
    numbers = [attr.sq_psn if here.name == "alice" else attr.rq_psn]
    attempt(lambda: numbers.append(swap(numbers[0], other)))
    return numbers


# %% check="connect-ready" points=1
# %%on alice bob
qp, count, before = fresh(), 0, packets_sent()
with QP(pd, kind) as late:
    attempt(connect, slowed(late) if here.name == "bob" else late, other)
    if here.name == "alice" and state(late) == "RTS":
        write_nothing(late)
        wait(sent)
        count = packets_sent() - before
    numbers = next_numbers(late)
print(f"Packets that {here.name} has sent: {count or '(not counted)'}. Alice needs one.")
print(f"The number of her next one, as {here.name} and {other} count: {numbers}.")
assert count or here.name == "bob", "Alice's is not in RTS: solve the two points above first."
numbered = here.name == "bob" or numbers[0] == numbers[-1]
assert numbered, "Alice's packet did not have the number that bob expected: whose card has he got?"
assert count < 2, "Alice sent before bob could receive: her packet was lost, and sent again."

# %% [markdown]
# ## 6 Every move, tried
#
# Seven states make 49 pairs. One state we cannot enter: SQE is for unreliable queue pairs (UC and
# UD), which may go on receiving after a failed send. An RC queue pair goes to ERR instead. That
# leaves 42 moves to try.
#
# **Predict.** How many of the 42 will the kernel allow? Which way leads out of ERR? Can one go from
# RTS back to INIT?

# %%
# %%on alice
WAYS = {"RESET": "", "INIT": "INIT", "RTR": "INIT RTR", "RTS": "INIT RTR RTS"}
WAYS |= {"SQD": "INIT RTR RTS SQD", "ERR": "INIT ERR"}


def move(qp, new, peer):
    """Ask for the move to `new`, with the attributes that lead there; the error's name, or ''."""
    card = {**make_card(peer), "psn": 1000}  # `peer` is a queue pair of ours, too
    attr = everything(card, card)
    attr.qp_state = e.ibv_qp_state[f"IBV_QPS_{new}"]
    known = MOVES.get((state(qp), new))
    mask = e.IBV_QP_STATE
    for name in known.required if known else REQUIRED["RC"].get(new, ()):
        mask |= e.ibv_qp_attr_mask[f"IBV_QP_{name}"]
    return attempt(qp.modify, attr, mask)


# %%
# %%on alice
def brought(to, peer):
    """A new queue pair, moved to the state `to`, with `peer` as its peer."""
    trial = QP(pd, kind)
    for step in WAYS[to].split():
        said = move(trial, step, peer)
        assert not said, f"{step}: {said}"
    deadline = time.monotonic() + 2
    while trial.query(e.IBV_QP_STATE)[0].sq_draining and time.monotonic() < deadline:
        time.sleep(0.001)  # SQD only: let it finish what it has begun
    return trial


# %%
# %%on alice
answers, far = {}, QP(pd, kind)
for old in WAYS:
    for new in STATES:
        with brought(old, far) as trial:
            answers[old, new] = move(trial, new, far)
print("from \\ to", *(f"{new:>7}" for new in STATES))
for old in WAYS:
    print(f"{old:9}", *(f"{answers[old, new] or 'ok':>7}" for new in STATES))
allowed = [pair for pair, said in answers.items() if not said]
surprises = [pair for pair in answers if (pair in allowed) != (pair in MOVES)]
print(len(allowed), "of", len(answers), "allowed; not as in the table:", surprises or "nothing")

# %% [markdown]
# **What happened.** One way up, RESET, INIT, RTR, RTS, without shortcuts and without a step back. Two
# ways out: RESET forgets, from every state; ERR stops, from every state but RESET. A few moves lead
# from a state to itself; they change attributes. SQD is a lay-by next to RTS: the device finishes what it has begun and starts
# nothing new, so that a program can change what must not change under way.
#
# The table that the kernel holds moves against is `qp_state_table` in
# `drivers/infiniband/core/verbs.c`. It is the specification's (InfiniBand volume 1, chapter 10.3),
# but for the first row of what follows. The other two rows are Soft-RoCE's own, and you will meet
# them in this lab. All that this course knows of such differences, on any subject, is collected in
# `docs/soft-roce.md`.

# %%
from IPython.display import Markdown

from rdmalab.hostside.qpstate import DIFFERENCES

rows = ["| | the specification says | here | therefore |", "|:--|:--|:--|:--|"]
for name in ("reset-to-err", "sqd-draining", "recv-in-err"):
    d = DIFFERENCES[name]
    rows.append(f"| **{d.subject}** | {d.specification} | {d.here} | {d.so} |")
Markdown("\n".join(rows))

# %% [markdown]
# ### Walk it yourself
#
# The next two cells give alice and bob a new queue pair each and draw alice's. Click a state (or, by
# keys: Tab to the list of moves, arrows to choose, Enter to make it): the picture shows the call with the attributes that it requires, filled in
# from bob's card. Change one, run it, and read the kernel's answer. Go up to RTS; try a move that the
# table forbids; go to ERR, and find the way out. The picture follows the moves that your cells make,
# too: `qp` is the same object. (Where no widgets run, there is a still picture of the last state, and
# `diagram.move("INIT")` does what a click does.)

# %%
# %%on alice bob
qp = fresh()

# %%
from rdmalab import view

diagram = view.qp_diagram(lab.alice, "qp", peer=lab.bob)
diagram

# %% [markdown]
# ## 7 What may be posted in which state
#
# **Predict.** For each state: will the device take a receive? A send? Will it carry them out, keep
# them, or give them back? Fill in six rows before you run the cell. Each time the queue pair has
# a partner in RTS, with a receive posted.

# %%
# %%on alice
print(f"{'':6} {'receive':9} {'came back as':14} {'send':9} came back as")
for name in WAYS:
    with QP(pd, kind) as partner, brought(name, partner) as trial:
        for step in WAYS["RTS"].split():
            move(partner, step, trial)
        post_recv(partner, 3)
        drain(sent, arrived)
        taken = [attempt(post_recv, trial, 1), attempt(post_send, trial, b"to my partner", 2)]
        time.sleep(0.3)
        receives = [said for wr_id, said in drain(arrived) if wr_id == 1]
        sends = [said for _, said in drain(sent)]
    receive, send = (said or "taken" for said in taken)
    print(f"{name:6} {receive:9} {(receives or '-')[0]:14} {send:9} {(sends or '-')[0]}")

# %% [markdown]
# **What happened.** A receive is taken from INIT on, *before* anything can arrive: so a program posts
# its receives there, and none of its peer's messages finds it unprepared. A send is refused until
# RTS. (Refused means: the *call* fails. The order never existed.) In SQD the send is held. And in
# ERR, of all states, both are **taken**, and come back at once with `WR_FLUSH_ERR`: the device gives
# back every order that it will not carry out, so that the program can free what belongs to it.
# (Alone, a receive that is posted in ERR would have stayed here: see the table above.)

# %% [markdown]
# ## 8 Break it
#
# Now an accident with orders under way. Bob posts four receives. Alice posts five orders: two
# messages, an RDMA WRITE with a wrong key, two more messages. First the next cell, folded again,
# connects alice and bob as your Task 4 does.


# %% hide="input"
# %%on alice bob
def bring_up(qp):
    """RESET to RTS, by pyverbs' own moves; both hosts call it. Our card and the peer's."""
    mine = make_card(qp)
    peer = swap(mine, other)
    qp.to_rts(everything(mine, peer))
    swap("ready", other)
    return mine, peer


# %%
# %%on alice bob
qp = fresh()
bring_up(qp)
if here.name == "bob":
    for wr_id in (1, 2, 3, 4):
        post_recv(qp, wr_id)
print(here.name, "to", swap(here.name, other), "in", state(qp))

# %% [markdown]
# **Predict.** Five orders at alice's, four receives at bob's: nine completions. What is the status of
# each? In which state are the two queue pairs afterwards?


# %%
# %%on alice bob
def post_bad_write(qp, wr_id):
    """Order: write eight bytes at the peer's address 0, with a key that nobody has given us."""
    piece = SGE(mr.buf, 8, mr.lkey)
    order = SendWR(wr_id=wr_id, opcode=e.IBV_WR_RDMA_WRITE, num_sge=1, sg=[piece])
    order.set_wr_rdma(0x1234, 0)
    qp.post_send(order)


# %%
# %%on alice
post_send(qp, b"first", 1)
post_send(qp, b"second", 2)
post_bad_write(qp, 3)
post_send(qp, b"fourth", 4)
post_send(qp, b"fifth", 5)
time.sleep(0.3)
print("alice:", drain(sent))
print("libibverbs remembers:", e.ibv_qp_state(qp.qp_state).name)
print("the device says:     ", state(qp))

# %%
# %%on bob
print("bob:", drain(arrived))
print("the device says:", state(qp))

# %% [markdown]
# **What happened.** Bob's device found the key wrong and refused (a *NAK* on the wire). On a reliable
# connection there is no going on after that: order 3 came back with its reason,
# `REM_ACCESS_ERR`, both queue pairs went to ERR by themselves, and all orders behind it were flushed.
#
# - **The first status that is not WR_FLUSH_ERR is the cause.** Flushes are only the echo. A program
#   that logs the last completion, or one in a hundred, logs "Work Request Flushed Error", and nobody
#   ever learns why.
# - **`qp.qp_state` is a memory.** libibverbs notes the state that *you* have set or asked for. The
#   device's own moves are not in it until you query.
# - **Bob has done nothing**, and is in ERR with two flushed receives.
#
# ### Out of ERR
#
# The only way is RESET, and up again from there, on **both** sides. Before that, alice posts two more
# sends in ERR, and does not look at what comes back.

# %%
# %%on alice
post_send(qp, b"too late", 6)
post_send(qp, b"too late", 7)

# %%
# %%on alice bob
number = qp.qp_num
qp.modify(QPAttr(qp_state=e.IBV_QPS_RESET), e.IBV_QP_STATE)
bring_up(qp)
post_recv(qp, 1)
swap("receive posted", other)
print(f"{here.name}: queue pair {number} is queue pair {qp.qp_num} in {state(qp)}")

# %% [markdown]
# **Predict.** The connection is new and healthy. Alice sends one message. What is the first thing in
# her completion queue?

# %%
# %%on alice
post_send(qp, b"a new life", 8)
first = wait(sent)
print("first:", first.wr_id, status(first))
time.sleep(0.2)
print("then:", drain(sent))

# %% [markdown]
# **What happened.** The first thing is order 6, flushed, from the life before. RESET empties the *send
# and receive queues*; a completion that has been written already lies in the *completion queue*,
# which is an object of its own, perhaps shared with other queue pairs. The queue pair's number in
# the completion does not help either: it is the same number.
#
# A program that takes "the next completion" for "the completion of my order" now believes that its
# message failed, and is one behind for ever. Two habits help: empty the completion queue between
# RESET and the next post, and give each order a number (`wr_id`) that is never used twice.

# %% [markdown]
# ### Task 5: recover (3 points)
#
# Complete `recover(qp, other)`. Both hosts call it with a queue pair in ERR. When it returns, *the
# same* queue pair is in RTS again, connected to the same peer, and both completion queues, `sent`
# and `arrived`, hold nothing from before.
#
# <details><summary>Hint 1</summary>
#
# One state leads out of ERR. A bare mask is enough for it: `IBV_QP_STATE`.
# </details>
# <details><summary>Hint 2</summary>
#
# From RESET on it is Task 4. (If that is not solved: the folded `bring_up(qp)` of this section does
# it too.)
# </details>
# <details><summary>Hint 3</summary>
#
# `drain(sent, arrived)` after RESET, when the old life can add nothing more, and before the new one
# can.
# </details>


# %% task="recover"
# %%on alice bob
def recover(qp, other):
    """Bring `qp` from ERR back to RTS, with nothing left from before; both hosts call it."""
    ### BEGIN SOLUTION
    qp.modify(QPAttr(qp_state=e.IBV_QPS_RESET), e.IBV_QP_STATE)
    drain(sent, arrived)
    bring_up(qp)
    ### END SOLUTION


# %%
# %%on alice bob
qp = fresh()
bring_up(qp)
for wr_id in (1, 2):
    post_recv(qp, wr_id)
swap("receives posted", other)
if here.name == "alice":
    post_bad_write(qp, 3)
deadline = time.monotonic() + 3
while state(qp) != "ERR" and time.monotonic() < deadline:
    time.sleep(0.0002)  # let others run: the device is software
number, patient, healed = qp.qp_num, qp, False
swap("broken", other)
print(f"{here.name}: queue pair {number} is in {shown(qp)}")

# %% check="recover-state" points=1
# %%on alice bob
old, healed = shown(patient), False
assert old == "ERR", f"It is in {old}, not in ERR: run the accident's cell again, then this check."
post_recv(patient, 8)  # two orders more that come back flushed
post_send(patient, b"too late", 9)
time.sleep(0.3)
said = attempt(recover, qp, other)
print(f"I called recover on both hosts. Error on {here.name}: {said or 'none'}.")
assert said != "EINVAL", "A move was refused: the table of section 6 shows the ways out of ERR."
assert not said, f"{said}: the other side did not come to the meeting."
now = {"queue pair": patient.qp_num, "state": shown(patient)}
print(f"Before: queue pair {number} in {old}. Now: {now}.")
healed = now["state"] == "RTS"
assert healed, "It is not in RTS: from RESET on, it has to learn everything anew."

# %% check="recover-clean" points=1
# %%on alice bob
left = drain(sent, arrived)
print(f"In {here.name}'s completion queues I found {left or 'nothing'}.")
assert healed, "But the check above says that it has not recovered, so this says nothing yet."
assert not left, "These are from before: the next poll would take them for something new."

# %% check="recover-bytes" points=1
# %%on alice bob
mr.write(bytes(mr.length), mr.length)
if healed:
    post_recv(qp, 11)
    attempt(swap, "receive posted", other)
    post_send(qp, f"{here.name} is back".encode(), 12)
expected = f"{other} is back".encode()
deadline = time.monotonic() + 1
while mr.read(len(expected), 4096) != expected and time.monotonic() < deadline:
    time.sleep(0.0002)  # let others run: the device is software
found = mr.read(len(expected), 4096)
print(f"I looked for {other}'s message on {here.name}: {found!r}.")
assert found == expected, "Nothing crosses it. Do both sides have each other's card?"

# %% [markdown]
# ## 9 Four that do not come up
#
# Four programmers have each written a bring-up of their own, and none of the four connections works.
# To make it easy to look at both ends, both queue pairs are alice's: the *near* one is brought up by
# the patient's program, the *far* one is healthy and connected to it. You get what one has in real
# life: a log. The next four cells are folded: they hold the patients. Open them when you are done.

# %% hide="input"
# %%on alice
HEALTHY = {"order": "INIT RTR RTS", "pkey_index": 0, "port_num": here.port, "qp_access_flags": 2}
HEALTHY |= {"is_global": 1, "sgid_index": gid_index, "path_mtu": 3, "rq_psn": 1000, "sq_psn": 1000}
HEALTHY |= {"max_rd_atomic": 1, "max_dest_rd_atomic": 1, "min_rnr_timer": 12, "rnr_retry": 3}
HEALTHY |= {"timeout": 12, "retry_cnt": 3}
PATIENTS = {
    "A": {"is_global": 0, "timeout": 13, "max_rd_atomic": 4},
    "B": {"sgid_index": wrong_family, "retry_cnt": 5, "qp_access_flags": 6},
    "C": {"path_mtu": 5, "min_rnr_timer": 14, "rnr_retry": 6},
    "D": {"order": "INIT RTS RTR", "max_dest_rd_atomic": 4, "timeout": 14},
}
FIELDS = {"INIT": "pkey_index port_num qp_access_flags", "RTS": "sq_psn max_rd_atomic"}
FIELDS["RTS"] += " retry_cnt rnr_retry timeout"
FIELDS["RTR"] = "is_global sgid_index path_mtu rq_psn max_dest_rd_atomic min_rnr_timer"


# %% hide="input"
# %%on alice
def filled(plan, target):
    """The attributes of a plan as a form; `target` is the other queue pair."""
    attr = QPAttr()
    for field in set(plan) - {"order", "is_global", "sgid_index"}:
        setattr(attr, field, plan[field])
    attr.dest_qp_num = target.qp_num
    route = GlobalRoute(dgid=GID(own_gid), sgid_index=plan["sgid_index"])
    attr.ah_attr = AHAttr(gr=route, is_global=plan["is_global"], port_num=here.port)
    return attr


# %% hide="input"
# %%on alice
def climb(qp, plan, target):
    """Make the moves of a plan, towards the queue pair `target`; the log, up to a refusal."""
    attr, log = filled(plan, target), []
    for new in plan["order"].split():
        old, attr.qp_state = state(qp), e.ibv_qp_state[f"IBV_QPS_{new}"]
        bits = (e.ibv_qp_attr_mask[f"IBV_QP_{name}"] for name in REQUIRED["RC"].get(new, ()))
        said = attempt(qp.modify, attr, sum(bits, e.IBV_QP_STATE))
        values = " ".join(f"{field}={plan[field]}" for field in FIELDS.get(new, "").split())
        log.append(f"{old:>5} to {new}: {said or 'ok':6} {values}")
        if said:
            break
    return log


# %% hide="input"
# %%on alice
def examine(name, **change):
    """Bring up a patient, with a change; its log, and whether a small and a large message came."""
    results, plan = [], {**HEALTHY, **PATIENTS[name], **change}
    with QP(pd, kind) as near, QP(pd, kind) as far:
        log = [f"{name}, near:", *climb(near, plan, far), "   far:", *climb(far, HEALTHY, near)]
        for size in (64, 3000) if state(near) == "RTS" else ():
            post_recv(far)
            post_send(near, bytes(size))
            results.append(status(wait(sent)))
            log.append(f"   near sends {size} bytes: {results[-1]}")
    drain(sent, arrived)
    return "\n".join(log), results == ["SUCCESS"] * 2


# %%
# %%on alice
for name in PATIENTS:
    print(examine(name)[0], end="\n\n")

# %% [markdown]
# ### Task 6: diagnose (4 points)
#
# For each patient, find **the one thing** that must change in its near side, and write it into `cure`:
# an attribute with its new value, such as `{"timeout": 14}`, or the order of the moves, such as
# `{"order": "RESET INIT"}`. Not everything that differs from the far side is wrong.
#
# <details><summary>Hint 1</summary>
#
# Read from where each log first says something else than `ok`. Which state was it in, which move did
# it ask for, is there such a move? If there is: which of the attributes of *that line* describe the
# way, and are they right for RoCE and for this host? Section 4 has printed the GID table.
# </details>
# <details><summary>Hint 2</summary>
#
# Two patients have the wrong way to the peer. One has a way that does not exist on RoCE, one a way
# of the wrong family. A third one makes a move that does not exist. The fourth one comes up: so the
# two ends do not agree about something, and small messages do not notice.
# </details>
# <details><summary>Hint 3</summary>
#
# The names to use are `is_global`, `sgid_index`, `path_mtu` and `order`, one for each patient.
# </details>

# %% task="diagnose"
# %%on alice
cure = {"A": {}, "B": {}, "C": {}, "D": {}}
### BEGIN SOLUTION
cure["A"] = {"is_global": 1}
cure["B"] = {"sgid_index": gid_index}
cure["C"] = {"path_mtu": e.IBV_MTU_1024}
cure["D"] = {"order": "INIT RTR RTS"}
### END SOLUTION

# %% check="diagnose-a" points=1
# %%on alice
log, well = examine("A", **cure["A"])
print(f"I brought A up with the change {cure['A'] or '(none yet)'}:", log, sep="\n")
assert cure["A"], (
    "A has no cure yet. It is refused at RTR: what must be there on every RoCE network?"
)
assert well, "A is still ill. Which attributes of its refused line say how to reach the peer?"
assert len(cure["A"]) == 1, "A is well, but with more than one change: which one was needed?"

# %% check="diagnose-b" points=1
# %%on alice
log, well = examine("B", **cure["B"])
print(f"I brought B up with the change {cure['B'] or '(none yet)'}:", log, sep="\n")
assert cure["B"], "B has no cure yet. Look its GID up in the table of section 4: what is it?"
assert well, "B is still ill. Which GID of ours can reach the address of the far side?"
assert len(cure["B"]) == 1, "B is well, but with more than one change: which one was needed?"

# %% check="diagnose-c" points=1
# %%on alice
log, well = examine("C", **cure["C"])
print(f"I brought C up with the change {cure['C'] or '(none yet)'}:", log, sep="\n")
assert cure["C"], (
    "C has no cure yet. 64 bytes pass and 3,000 do not: what counts only for the second?"
)
assert well, "C is still ill. Compare its line to RTR with that of the far side."
assert len(cure["C"]) == 1, "C is well, but with more than one change: which one was needed?"

# %% check="diagnose-d" points=1
# %%on alice
log, well = examine("D", **cure["D"])
print(f"I brought D up with the change {cure['D'] or '(none yet)'}:", log, sep="\n")
assert cure["D"], "D has no cure yet. In which state was it when it was refused first?"
assert well, "D is still ill. Follow the arrows in the drawing of section 2."
assert len(cure["D"]) == 1, "D is well, but with more than one change: which one was needed?"

# %% [markdown]
# **What to take home.** `EINVAL` from `modify` has a short list of causes. Go through it in order:
#
# 1. Is the move possible from the state that the *device* is in? (Query; do not trust your memory.)
# 2. Is the mask right: all required bits, none that the move does not take?
# 3. At RTR on RoCE: `is_global=1`, and an `sgid_index` whose GID is of the peer's family and holds
#    *now*?
# 4. Is a value out of range: port from 1, MTU code from 1 to 5, `timeout` below 32?
#
# And what no `EINVAL` tells: MTU, packet numbers and queue pair numbers of the two ends that do not
# fit together. The moves succeed, and the first message, or the first large one, does not arrive.

# %% [markdown]
# ## 10 `rdma_cm` does it for you
#
# The connection manager `rdma_cm` is what you have built: it exchanges the cards and makes the moves.
# It speaks over RDMA itself, through queue pair 1 of each device (the `GSI` line in section 1), with
# three messages: REQ (my card), REP (mine), RTU, *ready to use*, which is the second swap of Task 4.
# Programs address it like a socket: IP address and port. First the ready-made program, `rping`.

# %%
# %%on bob --bg --timeout 30
# !timeout 25 rping -s -a {here.ip} -C 3 -v 2>/dev/null

# %%
# %%on alice
server = here.peers["bob"]
# !for n in 1 2 3 4 5 6 7 8; do timeout 10 rping -c -a {server} -C 3 -v 2>/dev/null && break; sleep 0.5; done

# %%
# %wait bob

# %% [markdown]
# **Predict.** Now from Python, with the states in view. In which state will bob's queue pair be when
# the request has come and he has not accepted yet?

# %%
# %%on alice bob
import pyverbs.cm_enums as ce
from pyverbs.cmid import CMID, AddrInfo


def cm_state(end):
    """The state of the queue pair that belongs to an rdma_cm connection."""
    attr, _ = end.query_qp(e.IBV_QP_STATE)
    return e.ibv_qp_state(attr.qp_state).name.removeprefix("IBV_QPS_")


# %%
# %%on bob
door = AddrInfo(src=here.ip, src_service="7471", port_space=ce.RDMA_PS_TCP, flags=ce.RAI_PASSIVE)
listener = CMID(creator=door, qp_init_attr=QPInitAttr(qp_type=e.IBV_QPT_RC, cap=room))
listener.listen()

# %%
# %%on bob --bg --timeout 30
caller = listener.get_request()
inbox = caller.reg_msgs(64)
caller.post_recv(inbox)
print("a request has come:", cm_state(caller))
caller.accept()
print("accepted:          ", cm_state(caller))
done = caller.get_recv_comp()
print("received:", inbox.read(15, 0), status(done))

# %%
# %%on alice
way = AddrInfo(src=here.ip, dst=server, dst_service="7471", port_space=ce.RDMA_PS_TCP)
line = CMID(creator=way, qp_init_attr=QPInitAttr(qp_type=e.IBV_QPT_RC, cap=room))
print("made:     ", cm_state(line))
line.connect()
print("connected:", cm_state(line))
outbox = line.reg_msgs(64)
outbox.write(b"through rdma_cm", 15)
line.post_send(outbox)
print("sent:", status(line.get_send_comp()))

# %%
# %wait bob

# %% [markdown]
# **What happened.** Alice's queue pair was in INIT when it was made: `rdma_cm` makes the first move
# alone, so that receives can be posted early. `connect` and `accept` made the other two on their
# side, and each returned when the other side was ready. Same states, same attributes; the code that
# you wrote in Tasks 1 to 4 runs inside librdmacm and the kernel. (It also runs inside the `Endpoint`
# of `rdmalab.verbs`, which other labs use; `Endpoint.explain()` prints its calls, masks included.)

# %%
# %%on alice
line.close()

# %%
# %%on bob
caller.close()
listener.close()

# %% [markdown]
# ## On hardware
#
# - **The states are the same**, and so are the required attributes: drivers hold a move against the same
#   table of the kernel. What differs is what a driver refuses beyond it. On an Intel E810, a new queue
#   pair that was moved to RESET once more then refused to go to INIT (`EINVAL`); the authors of
#   Mooncake, a transfer engine, took that move out (pull request 721, 2025). So ask for the state,
#   and move only when you must.
# - **Refusals cost time**, and fast paths leave them out: NVIDIA's `post_send` (rdma-core,
#   providers/mlx5/qp.c) looks at the operation and at the room in the queue, not at the state. A send
#   that is posted too early need not be refused there. Know your state.
# - **Stale completions.** NVIDIA's user-space driver takes a queue pair's completions *out* of the
#   completion queue when it goes to RESET (`mlx5_modify_qp` calls `mlx5_cq_clean`, in rdma-core's
#   providers/mlx5/verbs.c). Soft-RoCE leaves them, as you saw. A program must be right with both.
# - **Time.** A bring-up is slow, since the card takes part in every move. Wei et al. give "several or
#   tens of milliseconds" for one RDMA connection (*KRCORE*, USENIX ATC 2022, abstract); a message
#   takes microseconds. Programs therefore open their connections early, and keep them.
# - **Security.** Nothing but the queue pair's number and the packet number tells a true packet from
#   a forged one. Rothenberger et al. injected packets into the connections of others (*ReDMArk*,
#   USENIX Security 2021). A first packet number drawn at random is the least one can do.
#
# ## What this does not show
#
# - SQE, and queue pairs of the types UC and UD: they need fewer attributes (`rdmalab.qpstate.REQUIRED`
#   lists them). Lab 07 is theirs.
# - A second path (`ALT_PATH`): InfiniBand only; the kernel refuses it on RoCE.
# - How long a bring-up takes: the device is software, and the guest may be emulated.
# - A peer on another machine: both hosts share one kernel here, so "the kernel knows" is simpler
#   than it is between two real ones.
#
# ## Food for thought
#
# 1. Why does the device need the peer's packet number at RTR, but its own only at RTS?
# 2. Alice is in RTS, bob still in INIT. Alice sends. What does bob's device do with the packet, and
#    when does alice notice? (You have measured it in Task 4.)
# 3. A hundred programs connect to a hundred programs. How many queue pairs, cards and moves are that?
#    What would you share?
# 4. Bob's host reboots, and a new program of his gets the old queue pair's number. What protects it
#    from alice's packets, which are still under way?
#
# ## Troubleshooting
#
# | symptom | likely cause | do |
# |:--|:--|:--|
# | `EINVAL` at RESET to INIT | a bit too few or too many in the mask; a port of 0 | `attributes_in_words(MOVES["RESET", "INIT"].required)` |
# | `EINVAL` at INIT to RTR | no GRH (`is_global=0`), a GID of another family, a mask | the list at the end of section 9 |
# | `ENODATA` at INIT to RTR | the GID table has nothing in that row (any more) | look the index up by value: `here.gid_index` |
# | `ETIMEDOUT` after a second at INIT to RTR | nobody answers at the peer's address | `%hosts`; on the host `!ip neighbour`, `!ping -c 1 10.0.0.2` |
# | `EINVAL` at RTR to RTS | it is not in RTR: an earlier move was refused, or has failed since | `state(qp)` |
# | moves succeed, `RETRY_EXC_ERR` at the first send | the peer is not in RTR yet, or a number of its card is wrong | compare cards; `rdma resource show qp` on both hosts |
# | small messages pass, large ones give `REM_INV_REQ_ERR` | two path MTUs | the smaller of both, on both sides |
# | only `WR_FLUSH_ERR` | the queue pair is in ERR since an earlier failure | the first completion that is not a flush |
# | the first completion after a recovery is a flush | it is from before | drain after RESET |
# | `TimeoutError` from `swap` | the cell ran on one host only | run it on both: `%%on alice bob` |
# | `Address already in use` | another program on the host waits on port 18515 | another `PORT`, on both hosts |
#
# ## Further reading
#
# - `ibv_modify_qp(3)`, `ibv_query_qp(3)`, `rdma_cm(7)`, `rping(1)`, `rdma-resource(8)`.
# - InfiniBand Trade Association, *InfiniBand Architecture Specification*, Volume 1: chapters
#   10.3 (states), 11.2 (the verbs, Modify Queue Pair among them), 12 (communication management: REQ,
#   REP, RTU).
# - Linux, `drivers/infiniband/core/verbs.c`: `qp_state_table` and `ib_modify_qp_is_ok`, a hundred lines
#   that are the law.
# - T. Shanley, *InfiniBand Network Architecture*, Addison-Wesley 2002: chapter 12 goes through the
#   states one by one.
#
# **Next lab:** 03, *One-sided against two-sided*: what each operation needs, costs and proves.

# %% [markdown]
# ## Clean up
#
# Each host closes what it has opened, and the picture stops following. The hosts go on running;
# `lab.down()` stops them.

# %%
diagram.close()

# %%
# %%on alice bob
close_all()
