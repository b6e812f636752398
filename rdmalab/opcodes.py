"""The numbers in a RoCEv2 packet's headers, by the specification's names.

IBTA is the *InfiniBand Architecture Specification*, Volume 1; RoCEv2 carries its transport headers.
"""

from __future__ import annotations

__all__ = ["CNP", "OPERATIONS", "RNR_TIMER_MS", "opcode_name", "syndrome_in_words"]

# The lower five bits of an opcode, counted from 0 (IBTA Volume 1, 9.2.1; 28 and 29 of release 1.5).
OPERATIONS = (
    "SEND_FIRST",
    "SEND_MIDDLE",
    "SEND_LAST",
    "SEND_LAST_WITH_IMMEDIATE",
    "SEND_ONLY",
    "SEND_ONLY_WITH_IMMEDIATE",
    "RDMA_WRITE_FIRST",
    "RDMA_WRITE_MIDDLE",
    "RDMA_WRITE_LAST",
    "RDMA_WRITE_LAST_WITH_IMMEDIATE",
    "RDMA_WRITE_ONLY",
    "RDMA_WRITE_ONLY_WITH_IMMEDIATE",
    "RDMA_READ_REQUEST",
    "RDMA_READ_RESPONSE_FIRST",
    "RDMA_READ_RESPONSE_MIDDLE",
    "RDMA_READ_RESPONSE_LAST",
    "RDMA_READ_RESPONSE_ONLY",
    "ACKNOWLEDGE",
    "ATOMIC_ACKNOWLEDGE",
    "COMPARE_SWAP",
    "FETCH_ADD",
    "RESYNC",
    "SEND_LAST_WITH_INVALIDATE",
    "SEND_ONLY_WITH_INVALIDATE",
    "RESERVED_24",
    "RESERVED_25",
    "RESERVED_26",
    "RESERVED_27",
    "FLUSH",
    "ATOMIC_WRITE",
)
TRANSPORTS = ("RC", "UC", "RD", "UD", "CNP", "XRC")  # the upper three bits
CNP = 0x81  # congestion notification packet (Annex A17)

# What a receiver-not-ready NAK asks the requester to wait, by its five bits (IBTA 9.7.5.2.8).
RNR_TIMER_MS = (
    *(655.36, 0.01, 0.02, 0.03, 0.04, 0.06, 0.08, 0.12, 0.16, 0.24, 0.32, 0.48, 0.64, 0.96, 1.28),
    *(1.92, 2.56, 3.84, 5.12, 7.68, 10.24, 15.36, 20.48, 30.72, 40.96, 61.44, 81.92, 122.88),
    *(163.84, 245.76, 327.68, 491.52),
)
NAKS = (
    "PSN sequence error",
    "invalid request",
    "remote access error",
    "remote operational error",
    "invalid RD request",
)


def opcode_name(code: int) -> tuple[str, str]:
    """Transport and operation of an opcode byte.

    >>> opcode_name(0x0A), opcode_name(0x64)
    (('RC', 'RDMA_WRITE_ONLY'), ('UD', 'SEND_ONLY'))
    """
    if code == CNP:
        return "RC", "CNP"
    transport, operation = code >> 5, code & 0x1F
    if transport >= len(TRANSPORTS) or operation >= len(OPERATIONS) or transport == 4:
        return "", f"UNKNOWN_0x{code:02x}"
    return TRANSPORTS[transport], OPERATIONS[operation]


def syndrome_in_words(syndrome: int) -> str:
    """What the byte in an acknowledgement says: its upper three bits are the kind (IBTA 9.7.5.2).

    >>> syndrome_in_words(0x1F), syndrome_in_words(0x2C), syndrome_in_words(0x62)
    ('ACK', 'RNR NAK', 'NAK: remote access error')
    """
    kind, value = syndrome >> 5, syndrome & 0x1F
    if kind == 0:
        return "ACK"
    if kind == 1:
        return "RNR NAK"
    if kind == 3:
        return f"NAK: {NAKS[value]}" if value < len(NAKS) else f"NAK: code {value}"
    return f"reserved syndrome 0x{syndrome:02x}"
