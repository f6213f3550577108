"""The transport ``ipc:///path`` on one host: messages on unix sockets, tensors in shared or GPU memory.

- `sockets` listens and connects, and refuses other users.
- `frames` splits a socket's bytes into messages.
- `handshake` negotiates the mailboxes of a connection.
- `slots` records which slots of a mailbox are in use.
- `mailbox` transfers tensors through shared memory.
- `cuda_mailbox` transfers tensors through GPU memory that both processes have mapped. `cuda` maps that
  memory.
- `doorbells` contains words (integers in shared memory) that signal the progress of rounds. It also contains
  the watchdog that limits the waits for these words.
- `blob_mailbox` (without GPUs) and `cuda_blob_mailbox` (with GPUs) exchange blobs: the states and trees of
  rounds.
- `deferred_release` frees the GPU memory of closed connections without blocking launches of GPU work.

A writer first writes a tensor to a slot of a mailbox, and then names the slot in a message. A reader
therefore never waits for its peer's memory. If no slot is free, the writer sends the tensor inside the
message, or sends the tensor later. The reader refuses a message that contradicts the mailbox's layout or
counters. If a peer stops or dies, the other side only sees a silent or closed socket.
"""
