"""The colocated transport ``ipc:///path``: messages on unix sockets, tensors in shared or device memory.

- `sockets` listens and connects, and refuses other users.
- `frames` splits a socket's bytes into messages.
- `handshake` negotiates the mailboxes of a connection.
- `slots` is the ledger of a mailbox: it records which slots are in use.
- `mailbox` transfers tensors through shared memory.
- `cuda_mailbox` transfers tensors through GPU memory that both processes have mapped; `cuda` maps it.
- `doorbells` contains the words by which two processes signal rounds, and the watchdog that bounds waits.
- `blob_mailbox` and `cuda_blob_mailbox` exchange the blobs of rounds, without and with GPUs.
- `deferred_release` frees memory that a GPU's streams may still use.

A reader of tensors never waits for its peer's memory: a message names a slot only after the rows have been
written there. If no slot is free, rows are sent inside the message, or later. Messages that do not fit the
mailbox are refused. A peer that stops or dies therefore leaves the other side only with a silent or closed
socket.
"""
