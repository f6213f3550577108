"""The colocated transport ``ipc:///path``: messages in frames on unix sockets, tensors in mailboxes of shared or device memory.

`sockets` listens and connects, and refuses other users; `frames` cuts a socket into messages; `slots` is the ledger of a mailbox;
`mailbox` moves tensors through shared memory; `cuda` and `cuda_mailbox` through memory of a GPU that both processes have mapped.

A reader never waits for the memory of its peer: a message names a slot and a generation only after its rows are there, and what does not
fit is dropped or refused. So a peer that stops or dies leaves the other side with a socket that is silent or closed, and nothing else.
"""
