"""Checks of peer_words, shared by interpreted tests on a CPU and compiled tests on a GPU.

The sender and the receiver are in one process and run one after the other.
"""

from __future__ import annotations

import torch
from guards import Guards, reference_version, triton_version

from outrider.kernels.peer_words import Mail, box_shape, receive_words, send_words


def mails(device: str, ranks: int) -> list[Mail]:
    boxes = [torch.empty(box_shape(ranks), dtype=torch.int64, device=device) for _ in range(ranks)]
    return [Mail.of(rank, boxes, 100) for rank in range(ranks)]


def check_words(device: str, ranks: int, counts: list[int], guards: Guards) -> None:
    """Check messages of any length and content, to all ranks and from all ranks, one after the other.

    Either end may be the reference.
    """
    numbers = torch.Generator().manual_seed(ranks)
    down, up = mails(device, ranks), mails(device, ranks)

    def words(count: int) -> torch.Tensor:
        return guards.put(
            torch.randint(-(1 << 31), 1 << 31, (count,), generator=numbers, dtype=torch.int32).to(device)
        )

    for turn, count in enumerate(counts):
        sent, given = words(count), [words(count) for _ in range(ranks)]
        with reference_version() if turn % 3 == 1 else triton_version(guards):
            send_words(sent, down[0], range(1, ranks), missing=0)
            for rank in range(1, ranks):
                send_words(given[rank], up[rank], range(1), missing=-1)
        gathered = guards.empty((ranks, count), torch.int32, torch.device(device))
        with reference_version() if turn % 3 == 2 else triton_version(guards):
            for rank in range(1, ranks):
                out = guards.empty((1, count), torch.int32, torch.device(device))
                receive_words(out, down[rank], range(1), missing=0)
                assert torch.equal(out[0], sent)
            receive_words(gathered, up[0], range(ranks), missing=-1, own=given[0])
        assert torch.equal(gathered, torch.stack(given))
    assert all(int(mail.lost) == 0 for mail in down + up)


def check_lost_words(device: str, guards: Guards) -> None:
    """Check that only the first missing message or receipt causes a wait.

    Afterwards received words are replaced by `missing`, and so are words to be sent.
    """
    _, reader = mails(device, 2)
    writer, _ = mails(device, 2)
    late, told = mails(device, 2)
    out = guards.empty((1, 5), torch.int32, torch.device(device))
    words = guards.put(torch.arange(5, dtype=torch.int32).to(device))
    with triton_version(guards):
        receive_words(out, reader, range(1), missing=-1)
        assert out.tolist() == [[-1] * 5]
        send_words(words, writer, range(1, 2), missing=-2)
        assert int(writer.lost) == 0
        assert (writer.boxes[1][0, 0, :5].int()).tolist() == [0, 1, 2, 3, 4]
        send_words(words, writer, range(1, 2), missing=-2)
        send_words(words, writer, range(1, 2), missing=-2)
        assert (writer.boxes[1][0, 0, :5].int()).tolist() == [-2] * 5
        told.lost.fill_(1)
        send_words(words, late, range(1, 2), missing=-2)
        receive_words(out, told, range(1), missing=-3)
        assert out.tolist() == [[-3] * 5]
    assert int(writer.lost) == int(reader.lost) == 1
