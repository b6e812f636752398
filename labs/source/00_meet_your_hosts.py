# %% [markdown]
# # Lab 00: Meet your hosts
#
# Start two real RDMA hosts, look at what they are made of, and move the first bytes from the
# memory of one into the memory of the other.
#
# ![Drawing. This notebook runs in JupyterLab on your machine. Cells marked %%on alice and %%on bob
# run on two hosts. Each host has Python with pyverbs, memory of its own, an RDMA device (rxe_alice
# and rxe_bob) and an Ethernet interface eth0 (10.0.0.1 and 10.0.0.2). A virtual Ethernet joins the
# two; RoCEv2 packets, which are UDP packets to port 4791, cross it.](images/00_two_hosts.svg)
#
# | | |
# |:--|:--|
# | **You will do** | look at two hosts, send a message and its answer, write into a remote memory, take a packet apart |
# | **You will learn** | device, port, GID and MTU in plain words; what SEND and RDMA WRITE need; what crosses the wire |
# | **You need** | 40 minutes, 700 MB of free memory, any backend |
# | **Before this** | nothing but a little Python |
#
# **How to work.** Run the cells from top to bottom. A cell that begins with `%%on alice` runs on
# alice, one with `%%on alice bob` on both. Each section asks for a *prediction* first. Write it
# down: a guess that turns out wrong teaches more than an output that was only read.

# %% [markdown]
# ## Start
#
# This starts the hosts, or finds those that run already. You can come back to this cell, or
# restart and run everything, at any time. (Names that a cell has made *on a host* are still there
# when the notebook was restarted.)

# %%
# %load_ext rdmalab
import rdmalab

lab = rdmalab.up()
# %hosts

# %% [markdown]
# ## 1 Two computers
#
# The kit started a Linux kernel of its own, in a small virtual machine (with the backend `vm`),
# and two *hosts* in it. A host is a container in the plain sense: it has a name, processes, an
# Ethernet interface, an RDMA device and a Python of its own. (With the backend `docker` your own
# kernel has them. With `local` they are two processes on it, which share all of that; the table
# above says what this changes.)
#
# **Predict.** Both hosts run the same three commands. What will be equal, what will differ? Will
# alice see the processes of bob?

# %%
# %%on alice bob
# !hostname
# !ip -brief address show eth0
# !ps -e -o pid,user,comm

# %% [markdown]
# **What happened.** Two names, two addresses, and each host lists only its own few processes.
# Process 1 takes care of the host. All that *you* run is the ordinary user `learner`: one needs
# rights to *set up* an RDMA device, but only its device file to *use* it.

# %% [markdown]
# ## 2 The RDMA device
#
# To the operating system, an RDMA network card is two things at once: an Ethernet interface
# (`eth0`) and an *RDMA device* that moves data between memories. Here the device is **Soft-RoCE**
# (`rdma_rxe`): a Linux driver that does in software what such a card does in hardware, over any
# Ethernet interface.
#
# **Predict.** How many RDMA devices does alice list? How many of them can she open?

# %%
# %%on alice
# !rdma link
# !ls /dev/infiniband

# %% [markdown]
# **What happened.** `rdma link` reads the kernel's list, and both hosts share one kernel, so alice
# sees that bob's device exists. She cannot use it: a program opens a device through its `uverbs`
# file in `/dev/infiniband`, and the only one in her folder is that of her own device. (`rdma_cm` is
# the connection manager, of which more in Lab 02.)
#
# Now ask alice's device about itself. `here` is the kit's note on the host a cell runs on. (On a
# host, `rdmalab` is another, smaller package than in the notebook.)

# %%
# %%on alice
from rdmalab import here

print(here.name, here.ip, here.device, "port", here.port)
# !ibv_devinfo -d {here.device}

# %% [markdown]
# **In plain words**
#
# | `ibv_devinfo` says | meaning |
# |:--|:--|
# | `hca_id` | the device's name; *HCA* (host channel adapter) is InfiniBand's word for the card |
# | `transport: InfiniBand` | the *protocol* between the queues is InfiniBand's; RoCE carries it in Ethernet and IP |
# | `phys_port_cnt`, `port: 1` | a device has ports, counted **from 1**; this one has one |
# | `state: PORT_ACTIVE` | the link is up; on anything else no data moves |
# | `active_mtu` | the most data bytes in one packet. Only 256, 512, 1024, 2048 and 4096 exist; the largest that fits the Ethernet interface with all headers is active |
# | `link_layer: Ethernet` | this is RoCE; a native InfiniBand port says `InfiniBand` and has a LID |

# %% [markdown]
# ## 3 The address: a GID
#
# Peers on RoCE name each other by **GID**, a 128-bit number written like an IPv6 address. A port
# has a *table* of them, which the kernel fills from the addresses of `eth0`. A program picks its own
# GID by **index** and names the peer's by **value**.
#
# **Predict.** Alice's address is `10.0.0.1`, four bytes. How will it look in sixteen?

# %%
# %%on alice bob
from pyverbs.device import Context
from rdmalab import here

with Context(name=here.device) as device:
    length = device.query_port(here.port).gid_tbl_len
    gids = {entry.gid_index: entry.gid_str() for entry in device.query_gid_table(length)}
for index, gid in gids.items():
    print(f"{here.name} GID {index}: {gid}")

# %% [markdown]
# **What happened.** What begins with `fe80` is a link-local IPv6 address, made from the interface's
# hardware address. There are two, because `eth0` has had two hardware addresses: the one of today,
# and the one with which the kit made it; the kernel keeps an entry for each. The entry with `ffff`
# before the last two groups is the *IPv4-mapped* form of the host's address: `0a00:0001` is 10, 0,
# 0, 1 in hexadecimal. Wanted is that one.
#
# Many programs have its index as a fixed number. It is a common cause of "it works on my machine":
# the index depends on the card, on the kernel and on the order in which addresses came and went.
# **Choose a GID by its value.**

# %% [markdown]
# ### Task 1: find the index of a GID (3 points)
#
# Complete `gid_index_of`. `table` maps index to GID text, as `gids` above. Return the index of the
# entry that stands for the IPv4 address `address`, or `None` when there is none. Run the cell, then
# the checks under it.
#
# <details><summary>Hint 1</summary>
#
# One GID can be written in several ways (`::ffff:10.0.0.1`, `0000:…:ffff:0a00:0001`). Compare
# numbers, not text: `ipaddress.ip_address(text)` understands all of them.
# </details>
# <details><summary>Hint 2</summary>
#
# `wanted` is an `ip_address` already. Go through `table.items()` and turn each GID into one too.
# </details>
# <details><summary>Hint 3</summary>
#
# The line inside the loop is `if ipaddress.ip_address(gid) == wanted: return index`.
# </details>

# %% task="gid-index"
# %%on alice
import ipaddress


def gid_index_of(address, table):
    """The index in `table` of the GID that stands for the IPv4 `address`, or None."""
    wanted = ipaddress.ip_address(f"::ffff:{address}")
    ### BEGIN SOLUTION
    for index, gid in table.items():
        if ipaddress.ip_address(gid) == wanted:
            return index
    ### END SOLUTION
    return None


# %% check="gid-index-own" points=1
# %%on alice
answer = gid_index_of(here.ip, gids)
print(f"I asked for the GID of {here.ip} in alice's own table; the answer was {answer!r}.")
assert type(answer) is int, "No index came back, although alice's table holds her address."
assert answer == here.gid_index, f"GID {answer} is {gids.get(answer)}: not alice's IPv4 address."
### BEGIN HIDDEN TESTS
assert gid_index_of(here.ip, dict(reversed(gids.items()))) == answer
### END HIDDEN TESTS
assert answer in gids, f"Alice's table has no entry {answer}."

# %% check="gid-index-any" points=2
# %%on alice
table = {0: "fe80::1", 3: "::ffff:10.9.8.7", 5: "0000:0000:0000:0000:0000:ffff:c0a8:0102"}
answers = [gid_index_of(address, table) for address in ("10.9.8.7", "192.168.1.2", "10.0.0.9")]
print(f"From another table I expected [3, 5, None]; the answers were {answers}.")
assert answers == [3, 5, None], "The index must come from the table, whatever its order and form."
### BEGIN HIDDEN TESTS
other = {7: "::ffff:a09:807", 2: "::a09:807", 0: "::FFFF:0A09:0806"}
assert gid_index_of("10.9.8.7", other) == 7, "Only an IPv4-mapped GID stands for an IPv4 address."
assert gid_index_of("10.9.8.6", other) == 0, "Index 0 is an answer like any other."
assert gid_index_of("10.9.8.7", {}) is None, "An empty table holds no address."
### END HIDDEN TESTS

# %% [markdown]
# ## 4 What a program needs
#
# A program reaches the device through five kinds of objects. Every RDMA program, in any language,
# makes these:
#
# | object | name here | what it is |
# |:--|:--|:--|
# | **context** | `ctx` | the opened device |
# | **protection domain** | `pd` | a fence: only objects within one domain work together |
# | **memory region** | `mr` | memory that the device may touch, with a key for local use (`lkey`) and one for peers (`rkey`) |
# | **completion queue** | `sent`, `arrived` | where the device reports what it has finished |
# | **queue pair** | `qp` | one end of a connection: a *send queue* and a *receive queue*, into which the program puts orders (*work requests*) |
#
# The program never hands data to the kernel, as it would with a socket. It hands the device an
# *order* that says where the data lies.

# %%
# %%on alice bob
import os
import statistics
import time

import pyverbs.enums as e
from pyverbs.addr import GID, AHAttr, GlobalRoute
from pyverbs.cq import CQ
from pyverbs.mr import MR
from pyverbs.pd import PD
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
from pyverbs.wr import SGE, RecvWR, SendWR


# %%
# %%on alice bob
def close_all():
    """Close what this lab has opened on this host, newest first."""
    for name in ("qp", "mr", "sent", "arrived", "pd", "ctx"):
        if name in globals():
            globals().pop(name).close()


close_all()  # what an earlier run of the lab has left
ctx = Context(name=here.device)
pd = PD(ctx)
sent, arrived = CQ(ctx, 64), CQ(ctx, 64)
mr = MR(pd, 4096, e.IBV_ACCESS_LOCAL_WRITE | e.IBV_ACCESS_REMOTE_WRITE)

# %% [markdown]
# The two flags on the memory region say who may write to it: the device on behalf of its own
# program (*local write*, needed to receive) and a peer with the key (*remote write*).
#
# The queue pair comes next. `RC` is the **reliable connection**: the device numbers the packets,
# waits for acknowledgements and repeats what is lost, much as TCP does. Then each host writes its
# visiting card: all that the other must know.

# %%
# %%on alice bob
room = QPCap(max_send_wr=64, max_recv_wr=64, max_send_sge=1, max_recv_sge=1)
qp = QP(pd, QPInitAttr(qp_type=e.IBV_QPT_RC, scq=sent, rcq=arrived, cap=room))

card = {
    "gid": gids[here.gid_index],  # which host
    "qp_num": qp.qp_num,  # which queue pair on it
    "psn": 1000,  # number of the first packet; real programs draw it at random
    "mtu": int(ctx.query_port(here.port).active_mtu),  # a code: 3 is 1024 bytes, 5 is 4096
    "address": mr.buf,  # where its memory begins
    "rkey": mr.rkey,  # the key to it
}
print(here.name, card)

# %% [markdown]
# **Predict.** How do the cards get to the other side, when there is no connection yet?
#
# Over *something else*: a TCP socket, a file, a service (the kernel's `rdma_cm` is one). RDMA
# peers always meet by other means first. Here this notebook carries the cards.

# %%
cards = {"alice": lab.alice.get("card"), "bob": lab.bob.get("card")}
for host, peer in ((lab.alice, cards["bob"]), (lab.bob, cards["alice"])):
    host.put(peer=peer)

# %% [markdown]
# Now each side tells its queue pair about the other one, and moves it from RESET through INIT and
# RTR (*ready to receive*) to RTS (*ready to send*). `to_rts` makes all three moves; Lab 02 makes
# them one by one.

# %%
# %%on alice bob
attr = QPAttr(port_num=here.port)
attr.qp_access_flags = e.IBV_ACCESS_REMOTE_WRITE
attr.path_mtu = min(card["mtu"], peer["mtu"])
attr.dest_qp_num, attr.rq_psn, attr.sq_psn = peer["qp_num"], peer["psn"], card["psn"]
route = GlobalRoute(dgid=GID(peer["gid"]), sgid_index=here.gid_index)
attr.ah_attr = AHAttr(gr=route, is_global=1, port_num=here.port)
attr.timeout = 14  # wait 4.096 us * 2**14 = 67 ms for an acknowledgement,
attr.retry_cnt = 6  # then send again, at most 6 times
attr.min_rnr_timer = 12  # "I have no receive posted: wait 0.64 ms, then send again";
attr.rnr_retry = 6  # when the peer says so, do it, at most 6 times
qp.to_rts(attr)
print(here.name, "queue pair", qp.qp_num, "is in", e.ibv_qp_state(qp.qp_state).name)

# %% [markdown]
# **What happened.** Both ends know each other, and not one packet was exchanged for it: each side
# was only told what to expect. (Section 8 has the tool to see that. The kernel may have asked with
# ARP for the peer's Ethernet address.) If a card were wrong, nobody would notice before the first
# message.

# %% [markdown]
# ## 5 First message: SEND and RECEIVE
#
# Three small functions, one verb each. They use two places in the 4096 bytes: messages leave from
# byte 0 on, and arrive from byte 1024 on. An order names a piece of own memory by an **SGE**
# (*scatter/gather element*): address, length, lkey.

# %%
# %%on alice bob
OUTBOX, INBOX, ROOM = 0, 1024, 64


def post_receive():
    """Order: put the next message into the inbox."""
    qp.post_recv(RecvWR(num_sge=1, sg=[SGE(mr.buf + INBOX, ROOM, mr.lkey)]))


def post_send(data):
    """Order: send `data`, which must stay in the outbox until the completion."""
    mr.write(data, len(data), OUTBOX)
    piece = SGE(mr.buf + OUTBOX, len(data), mr.lkey)
    qp.post_send(SendWR(opcode=e.IBV_WR_SEND, num_sge=1, sg=[piece]))


# %%
# %%on alice bob
def wait(queue, seconds=5):
    """The next completion in `queue`. A wait without a deadline is a program that hangs."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        count, completions = queue.poll()
        if count:
            return completions[0]
        os.sched_yield()  # let others run: the device is software and needs this CPU, too
    raise TimeoutError(f"{here.name}: no completion within {seconds} s")


# %% [markdown]
# **Predict.** Alice is about to send. Is there anything bob must do *before*? What would happen if
# he forgot?

# %%
# %%on bob
post_receive()

# %%
# %%on alice
post_send(b"hello bob, this is alice")
done = wait(sent)
print("alice's order:", e.ibv_wc_status(done.status).name)

# %%
# %%on bob
done = wait(arrived)
print("bob's order:", e.ibv_wc_status(done.status).name, "with", done.byte_len, "bytes")
print(mr.read(done.byte_len, INBOX))

# %% [markdown]
# **What happened.** Bob had to give his device a place *before* the message came: the device puts
# an arriving message straight into the program's memory, and holds none in store. Without a
# receive, bob's device answers "receiver not ready" (RNR), and alice's tries again, six times as we
# told it, before it gives up.
#
# Both sides took part, and both got a completion: SEND is **two-sided**.

# %% [markdown]
# ## 6 Ping-pong
#
# Bob answers 300 messages beside the notebook (`--bg`); alice sends them and takes the time.
#
# **Predict.** How long takes a message one way, in microseconds?

# %%
rounds = 300
for host in (lab.alice, lab.bob):
    host.put(rounds=rounds)

# %%
# %%on bob
post_receive()  # before alice can send: her first message must find a place

# %%
# %%on bob --bg
for _ in range(rounds):
    wait(arrived)
    post_receive()  # for the next one, before the answer lets it come
    post_send(b"pong")
    wait(sent)

# %%
# %%on alice
times_us = []
for _ in range(rounds):
    start = time.perf_counter()
    post_receive()
    post_send(b"ping")
    wait(arrived)
    times_us.append((time.perf_counter() - start) * 1e6)
    wait(sent)
print(f"half a round trip, median of {rounds}: {statistics.median(times_us) / 2:.0f} us")

# %%
# %wait bob

# %% [markdown]
# **What happened.** Three hundred pings found three hundred receives. Do not read the time as
# "RDMA is this slow" or "this fast": it is the time of a software device, under a Python loop, in
# a virtual machine that perhaps emulates its processor (then it is milliseconds, on a busy machine
# tens of them). Lab 04 measures with care and against TCP.
# What holds on every device is the *order*: receive posted, then sent, then completed.

# %% [markdown]
# ## 7 First RDMA WRITE
#
# Bob's card held an address and a key. With these, alice can order her device to write into bob's
# memory directly. First bob wipes his memory, and reads the packet counters of his device.

# %%
# %%on bob
import json
import subprocess


def packets():
    """How many packets bob's device has received and sent."""
    link = f"{here.device}/{here.port}"
    shown = subprocess.check_output(["rdma", "-j", "statistic", "show", "link", link])
    counters = json.loads(shown)[0]
    return counters["rcvd_pkts"], counters["sent_pkts"]


mr.write(bytes(mr.length), mr.length)
before = packets()

# %% [markdown]
# **Predict.** Bob runs nothing at all now, and posts no receive. How many completions will alice
# get, how many bob? How many packets will bob's device have received?

# %%
# %%on alice
text = b"written by alice"
mr.write(text, len(text), OUTBOX)
order = SendWR(
    opcode=e.IBV_WR_RDMA_WRITE,
    num_sge=1,
    sg=[SGE(mr.buf + OUTBOX, len(text), mr.lkey)],  # from here
)
order.set_wr_rdma(peer["rkey"], peer["address"] + 2048)  # to bob's byte 2048
qp.post_send(order)
done = wait(sent)
print("alice's order:", e.ibv_wc_status(done.status).name)

# %%
# %%on bob
print("bob's bytes from 2048 on:", mr.read(16, 2048))
print("completions in bob's queues:", sent.poll()[0] + arrived.poll()[0])
came, went = (now - then for now, then in zip(packets(), before, strict=True))
print(f"packets: {came} received, {went} sent")

# %% [markdown]
# **What happened.** The bytes are in bob's memory, and not one line of bob's program ran for it.
# He has no completion: WRITE is **one-sided**. (How he learns that something came is the subject of
# Lab 03.) His device counted one packet in, alice's WRITE, and one out, the acknowledgement that
# became alice's completion.
#
# Note who held the rights: bob's memory region allowed remote writes, his queue pair too, and alice
# had the key. Take away any of the three, and bob's device refuses.

# %% [markdown]
# ## 8 A first capture: what a RoCEv2 packet is made of
#
# So far you have seen what the *programs* saw. Now look at the wire. `lab.capture()` listens on
# alice's `eth0` while its block runs, with `tcpdump`, as an administrator of the network would.
# (The learner on alice could not: listening takes rights.)
#
# **Predict.** Alice writes the same 16 bytes once more. How many packets will cross the wire, and
# how many bytes will the first of them have, in all?


# %%
# %%on alice
def write_again():
    """The WRITE of section 7 once more: 16 bytes to bob's byte 2048; how it ended."""
    mr.write(b"written by alice", 16, OUTBOX)
    piece = SGE(mr.buf + OUTBOX, 16, mr.lkey)
    again = SendWR(opcode=e.IBV_WR_RDMA_WRITE, num_sge=1, sg=[piece])
    again.set_wr_rdma(peer["rkey"], peer["address"] + 2048)
    qp.post_send(again)
    return e.ibv_wc_status(wait(sent).status).name


# %%
with lab.capture() as wire:
    lab.alice.run("print(write_again())")

wire.packets

# %% [markdown]
# **What happened.** One packet each way, as bob's counters said in section 7. *RDMA WRITE ONLY*: the
# message fits into one packet (a longer one has a *FIRST*, *MIDDLE*s and a *LAST*). It names the
# queue pair it is for, has a packet number (PSN; alice's began at the 1000 on her card) and asks for
# an acknowledgement. The *ACK* repeats that number. (Lines that begin with *again*? Then your machine was busy, the ACK took longer than
# the 67 ms that we allow, and alice's device repeated the packet: section 4 told it to.)
#
# Now take the first packet apart, from the outside in. The cards gave addresses and keys in decimal,
# a capture gives them in hexadecimal: `hex(...)` shows that they are the same.

# %%
wire.layers(1)

# %% [markdown]
# ![Drawing. The parts of two packets. RDMA WRITE ONLY, 90 bytes: Ethernet 14, IPv4 20, UDP 8, BTH 12,
# RETH 16, payload 16, ICRC 4. ACKNOWLEDGE, 62 bytes: Ethernet 14, IPv4 20, UDP 8, BTH 12, AETH 4,
# ICRC 4.](images/00_packet.svg)
#
# | part | what it is for |
# |:--|:--|
# | **Ethernet, IPv4, UDP** | bring the packet to the host. Routers and switches read only these, so RoCEv2 crosses ordinary IP networks. UDP port 4791 says "RoCEv2" |
# | **BTH**, base transport header | in every packet: the operation (*opcode*), the queue pair, the PSN |
# | **RETH**, RDMA extended transport header | where in bob's memory: address and rkey, from bob's card, and how many bytes |
# | **payload** | the bytes themselves, readable by everyone on the way: nothing is encrypted |
# | **ICRC**, invariant checksum | over all that must not change on the way; the device drops a packet if it is wrong |
# | **AETH**, ACK extended transport header | only in answers: an ACK, or the reason of a refusal; and how many of the peer's messages are complete (*MSN*, message sequence number) |
#
# Of 90 bytes, 16 are alice's. There is no name of a program or user in it, and no password: the rkey
# is the only thing that bob's device checks. Note what bob's device does with such a packet: it finds
# the place itself, in bob's memory. That is all that "remote direct memory access" means.

# %% [markdown]
# The same as a **ladder**: time runs downward, each host is a line, each packet an arrow. This time a
# SEND; and beside the arrows stand the calls, which noted the time on the hosts' clock.
#
# **Predict.** Alice's completion: will it come before or after the ACK has passed?


# %%
# %%on alice
def send_and_note(data):
    """SEND, wait, and note when each was: a list of (host, what, time)."""
    start = time.time()
    post_send(data)
    wait(sent)
    return [("alice", f"post_send({data})", start), ("alice", "completion", time.time())]


# %%
lab.bob.run("post_receive()")
with lab.capture() as wire:
    lab.alice.run("calls = send_and_note(b'on the wire')")
    lab.bob.run("done = wait(arrived)")

wire.ladder(lab.alice.get("calls"), title="One SEND")

# %% [markdown]
# **What happened.** After: the ACK *is* what completes alice's order. A SEND carries no RETH, for
# alice says nothing about bob's memory; the place is the one that bob's receive has given.
#
# In a terminal, `rdmalab capture alice` prints the packets as they pass; `wire.save("first.pcap")`
# writes a file for Wireshark, which decodes RoCEv2 as well.

# %% [markdown]
# ### Task 2: leave a note (3 points)
#
# Bob wipes his memory again. Write `note` into it at byte `place`, without bob's help and without
# touching any other byte, and put alice's completion into `result`.
#
# <details><summary>Hint 1</summary>
#
# The cell of section 7 does almost this. What must change: the bytes and the place.
# </details>
# <details><summary>Hint 2</summary>
#
# `set_wr_rdma` takes bob's key and an absolute address: where his memory begins, plus `place`.
# </details>
# <details><summary>Hint 3</summary>
#
# Was there an error? Then the queue pair is in state ERR and flushes every further order. Run the
# cells of section 4 again, from the one with `close_all` to the one with `to_rts` (the cell that
# carries the cards included), then the cell under this text.
# </details>

# %%
# %%on bob
mr.write(bytes(mr.length), mr.length)

# %% task="note"
# %%on alice
note, place = b"alice was here", 3000
while sent.poll()[0]:
    pass  # completions of an earlier try: not the one that you wait for
result = None  # to become the completion of your order
### BEGIN SOLUTION
mr.write(note, len(note), OUTBOX)
order = SendWR(
    opcode=e.IBV_WR_RDMA_WRITE,
    num_sge=1,
    sg=[SGE(mr.buf + OUTBOX, len(note), mr.lkey)],
)
order.set_wr_rdma(peer["rkey"], peer["address"] + place)
qp.post_send(order)
result = wait(sent)
### END SOLUTION

# %% check="note-place" points=2
# %%on bob
found = mr.read(14, 3000)
rest = mr.read(3000, 0) + mr.read(mr.length - 3014, 3014)
mr.write(bytes(mr.length), mr.length)  # bob has read it, and wipes his memory for your next try
told = 0
while arrived.poll()[0]:
    told += 1
print(f"I looked at bob's bytes 3000 to 3013, and wiped his memory: {found!r}.")
assert found == b"alice was here", (
    "Your note is not there. (Zeros: nothing was written since bob wiped his memory. Run your "
    "cell again; but if the next check speaks of an error, do first what it says.)"
)
### BEGIN HIDDEN TESTS
assert rest == bytes(len(rest)), "Other bytes of bob's memory have changed, too."
assert told == 0, "Bob has a completion: a SEND, then, and no RDMA WRITE."
### END HIDDEN TESTS

# %% check="note-completion" points=1
# %%on alice
print("I looked at `result`, which should be the completion of a WRITE.")
assert result is not None, "`result` is still None: nobody waited for the completion."
status = e.ibv_wc_status(result.status).name
assert status == "IBV_WC_SUCCESS", (
    f"The order ended with {status}. The queue pair is in ERR now: run section 4 again, from "
    "`close_all` to `to_rts` with the cards' cell, then bob's wipe, then your cell."
)
### BEGIN HIDDEN TESTS
assert result.opcode == e.IBV_WC_RDMA_WRITE, "This is the completion of another operation."
### END HIDDEN TESTS

# %% [markdown]
# ## What is real here, and what is not
#
# | real | not as on a card |
# |:--|:--|
# | the programming interface: the same libibverbs calls as on any RDMA card | the device is a driver: the hosts' CPUs build, check and copy every packet |
# | the protocol: queue pairs, keys, packet numbers, acknowledgements, retries | speed: nothing here is a figure for RDMA hardware |
# | the packets: RoCEv2, with their checksum, on the (virtual) wire | distance: both hosts are in one virtual machine, with one kernel and one clock |
# | the protection: wrong keys and missing rights are refused by the *other* side | kernel bypass: here each `post_send` enters the kernel with a `write()` system call; polling does not |

# %% [markdown]
# ## On hardware
#
# - **No system call.** The program writes the order into a queue in its own memory and rings the
#   card's doorbell, a register mapped into the process. (Kalia, Kaminsky, Andersen: *Design
#   Guidelines for High Performance RDMA Systems*, USENIX ATC 2016, counts these PCIe transactions.)
# - **Time.** Two 100 Gb/s ConnectX-4 cards with a cable of half a metre: 0.83 µs one way for a SEND
#   of 32 bytes on RC, 2.3 µs for 4 KiB, by `ib_send_lat` (D. Potter, master's thesis, RWTH Aachen
#   University, 2018). Set your ping-pong beside it.
# - **The GID table** is longer: many cards list each address twice, as RoCE v1 and as RoCE v2
#   (`/sys/class/infiniband/*/ports/1/gid_attrs/types/` tells which is which). Choose by value *and*
#   type there.
# - **Loss.** Cards repeat lost packets, as Soft-RoCE does, but data centres go to great lengths to
#   lose none: see Zhu et al., *Congestion Control for Large-Scale RDMA Deployments*, SIGCOMM 2015.

# %% [markdown]
# ## What this does not show
#
# - How fast RDMA is, and how little CPU it takes: the device itself lives on the CPU here. That
#   bob's *program* did nothing is true; that his *processor* did nothing is not.
# - That a completed WRITE is visible to a program which is reading at that moment. Bob looked much
#   later. Lab 03 looks closer.
# - A network: one virtual cable has no switch buffers, no congestion and no loss of its own.

# %% [markdown]
# ## Food for thought
#
# 1. Alice got bob's address and key from bob himself. What could she do with the key of somebody
#    else's memory? Who would have to prevent it?
# 2. A socket gives you a stream that the kernel buffers. Where are the buffers here, and who decides
#    how many there are?
# 3. Your program receives 1,000 small messages per second from each of 1,000 peers. How many
#    receives must be posted, and how much memory is that?
#
# ## Troubleshooting
#
# | symptom | likely cause | do |
# |:--|:--|:--|
# | a host does not answer, or its kernel died | its memory ran out, or a call crashed the library | `lab.alice.restart()`, then run again from the start |
# | `NameError` on a host | its kernel was restarted, or cells were left out | run again from section 2 |
# | `Failed to modify QP ... Errno: 22, Invalid argument` | a GID of the wrong family: look at `sgid_index` and the table of section 3 | section 3, then 4 |
# | `Failed to modify QP ... Errno: 110` | the peer's address does not answer | `%hosts`; then `!ip address` and `!ip neighbour` on the host |
# | `TimeoutError: no completion` | the other side has not posted its part, or the queue pair is in ERR | `e.ibv_qp_state(qp.qp_state).name` |
# | `IBV_WC_RNR_RETRY_EXC_ERR` | the peer had posted no receive | post it, then section 4 from `close_all` to `to_rts`, the cards' cell included |
# | `IBV_WC_RETRY_EXC_ERR` | the peer's queue pair is gone: section 4 ran again on one side only | section 4 on both hosts |
# | `IBV_WC_REM_ACCESS_ERR` | wrong address or key: the peer's memory region was made anew | exchange the cards again |
# | `IBV_WC_WR_FLUSH_ERR` | an earlier order failed, and the queue pair is in ERR | section 4 from `close_all` to `to_rts`, the cards' cell included |
#
# ## Further reading
#
# - `rdma-link(8)`, `ibv_devinfo(1)`, `ibv_post_send(3)`, `ibv_poll_cq(3)`, `rxe(7)`: on the hosts'
#   distribution, Debian, in the packages `rdma-core`, `iproute2` and `libibverbs-dev`.
# - InfiniBand Trade Association, *InfiniBand Architecture Specification*, Volume 1: chapters 9
#   (transport layer, with all headers and opcodes) and 10 (software transport interface), and Annex A17, RoCEv2.
# - Dragojević et al., *FaRM: Fast Remote Memory*, NSDI 2014: what one-sided operations were good for
#   in a whole system.
#
# **Next lab:** 01, *Register memory*: what a memory region costs, and what its keys protect.

# %% [markdown]
# ## Clean up
#
# Each host closes what it has opened. The hosts themselves go on running for the next lab;
# `lab.down()` stops them.

# %%
# %%on alice bob
close_all()
