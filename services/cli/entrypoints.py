"""Functions that run the gateway, target and draft services for `outrider serve gateway|target|draft`.

Services do not import each other. Only this module, the command line and the launcher import several
services. This module imports a service only when that service starts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from outrider.services.hub.model_folder import model_folder
from outrider.services.stack.options import INPROC
from outrider.shared.base.garbage import without_collections
from outrider.shared.rpc.polling import watch_sockets
from outrider.shared.spec.algorithm import Algorithm

if TYPE_CHECKING:
    from outrider.services.draft.settings import DraftSettings
    from outrider.services.gateway.settings import GatewaySettings
    from outrider.services.target.settings import TargetSettings


def run_gateway(settings: GatewaySettings) -> int:
    """Run the gateway until it is stopped."""
    watch_sockets()
    with without_collections():
        from outrider.services.gateway import app

    return app.run(settings)


def run_target(settings: TargetSettings) -> int:
    """Run the target service until it is stopped.

    With ``--draft inproc:[DIR]``, the draft runs in the target's process, and this function loads the draft
    too. Without a DIR, ``--speculative-algorithm`` names the drafting method: n-grams or the MTP layers of
    the target model.
    """
    watch_sockets()
    with without_collections():
        from outrider.services.target import app

    model = model_folder(settings.model, "--model", settings.revision)
    settings = settings.model_copy(update={"model": model})
    if not settings.draft.startswith(INPROC) or settings.speculative_algorithm is Algorithm.NONE:
        return app.run(settings)
    with without_collections():
        from outrider.services.draft.inproc import drafter_beside
        from outrider.services.draft.settings import DraftSettings
    from outrider.services.target.settings import MOST_RUNNING_REQUESTS

    # The target and the draft must agree on tree shapes, limits and page size.
    alike = ("max_steps", "max_topk", "max_nodes", "page_size", "num_steps", "topk", "num_draft_tokens")
    caps = {name: getattr(settings, name) for name in (*alike, "cuda_graph_max_bs", "disable_cuda_graph")}
    draft_name = settings.draft.removeprefix(INPROC)
    folder = model_folder(draft_name, "--draft", settings.draft_revision) if draft_name else None
    draft = DraftSettings.load(
        {
            "draft": folder,
            "speculative_algorithm": settings.speculative_algorithm.value,
            "speculative_token_map": settings.speculative_token_map,
            "ngram_corpus": settings.ngram_corpus,
            "target_weights": settings.model,
            "max_sessions": settings.max_running_requests or MOST_RUNNING_REQUESTS,
            "disable_tile_trial": settings.disable_tile_trial,
            **caps,
        }
    )
    draft.check()
    # From here on, the cleared settings belong to the draft. The target would refuse them.
    plain = settings.model_copy(update={"draft": "none", "speculative_token_map": None, "ngram_corpus": None})
    return app.run(plain, lambda decoder, sizing: drafter_beside(decoder, draft, sizing))


def import_draft() -> None:
    """Import the code of the draft service, which takes seconds."""
    with without_collections():
        from outrider.services.draft import app  # noqa: F401


def run_draft(settings: DraftSettings) -> int:
    """Run the draft until it is stopped."""
    watch_sockets()
    with without_collections():
        from outrider.services.draft import app

    folders = {}
    if settings.draft is not None:
        folders["draft"] = model_folder(settings.draft, "--draft", settings.draft_revision)
    if settings.target_weights is not None:
        folders["target_weights"] = model_folder(
            settings.target_weights, "--target-weights", settings.revision
        )
    return app.run(settings.model_copy(update=folders))
