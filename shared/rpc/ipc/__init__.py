"""The colocated transport ``ipc:///path``: messages on unix sockets, tensors in shared or device memory.

- `sockets` listens and connects, and refuses other users.
- `frames` splits a socket's bytes into messages.
- `handshake` agrees on the mailboxes of a connection.
- `slots` is the ledger of a mailbox: which slots are in use.
- `mailbox` transfers tensors through shared memory.
- `cuda_mailbox` transfers tensors through GPU memory that both processes have mapped; `cuda` maps it.
- `doorbells` are the words with which two processes signal rounds, and the watchdog that bounds every wait.
- `blob_mailbox` and `cuda_blob_mailbox` exchange the blobs of rounds, without and with GPUs.
- `deferred_release` frees memory that a GPU's streams may still use.

A reader of tensors never waits for its peer's memory. A message names a slot and a generation only after its
rows are there. Rows that find no free slot are sent inline or later, and messages that do not fit the mailbox
are refused. A peer that stops or dies therefore leaves the other side only with a silent or closed socket.
"""
