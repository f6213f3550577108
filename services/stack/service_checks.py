"""Checks model folders and the flags of services. The flags are checked by the services' settings classes."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from functools import partial
from pathlib import Path

from outrider.services.stack.options import StackOptions
from outrider.services.stack.own_certificate import check_own_certificate, probe_context
from outrider.shared.base.errors import ConfigurationError
from outrider.shared.base.model_paths import dangling_links


def check_gateway_flags(options: StackOptions) -> None:
    """Check the gateway's flags with the gateway's own settings class, before the gateway starts.

    Raises:
        ConfigurationError: A value is invalid, other hosts could connect without an API key, or the gateway
            would refuse its own certificate.
    """
    from outrider.services.gateway.settings import GatewaySettings

    settings = GatewaySettings.load(
        {"host": options.host, "port": options.port, "grpc_port": options.grpc, **options.gateway_settings}
    )
    settings.check()
    if settings.tls_ca is not None and settings.tls_cert is not None:
        check_own_certificate(settings.tls_cert, settings.tls_key, settings.tls_ca)


def gateway_context(options: StackOptions) -> Callable[[], ssl.SSLContext | bool]:
    """Return a function whose result is the TLS parameter for the gateway: `verify` of a `RestClient`.

    Each call of the returned function reads the certificate files again, because they may have been renewed.
    """
    from outrider.services.gateway.settings import GatewaySettings

    settings = GatewaySettings.load(dict(options.gateway_settings))
    return partial(probe_context, settings.tls_cert, settings.tls_key, settings.tls_ca)


def check_target_flags(options: StackOptions, own_process: bool) -> None:
    """Check the target's flags with the target's own settings class. This imports torch.

    Nothing is checked if no flag is given that only the target reads.

    Args:
        options: Options of `outrider up`.
        own_process: True if the draft has a process of its own.

    Raises:
        ConfigurationError: A value is invalid, or two flags conflict.
    """
    if not options.target_settings and options.mem_fraction_static is None:
        return
    from outrider.services.target.settings import TargetSettings

    draft = "unix:/draft" if own_process else "none"
    related = {
        "model": options.target,
        "device": options.device,
        "dtype": options.dtype,
        "tp": options.tp,
        "draft": draft,
    }
    related["mem_fraction_static"] = options.mem_fraction_static
    TargetSettings.load({**related, **options.target_settings}).check()


def check_model_folder(folder: Path, flag: str, hint: str = "") -> None:
    """Reject a folder that does not contain a complete model.

    Args:
        folder: The model's folder.
        flag: The flag that named the folder.
        hint: A sentence to add at the end of the error message.

    Raises:
        ConfigurationError: The folder, its configuration or its weights are missing.
    """
    if not folder.is_dir():
        raise ConfigurationError(f"{flag} {folder}: there is no such folder.{hint}", field=flag)
    if link := dangling_links(folder):
        raise ConfigurationError(f"{flag} {folder}: {link}", field=flag)
    # Mistral publishes draft heads with params.json instead of config.json.
    if not any(
        (folder / name).exists()
        for name in (("config.json", "params.json") if flag == "--draft" else ("config.json",))
    ):
        message = (
            f"{flag} {folder} has no config.json. Give a complete model folder in Hugging Face layout.{hint}"
        )
        raise ConfigurationError(message, field=flag)
    if not any(folder.glob("*.safetensors")) and not any(folder.glob("*.bin")):
        raise ConfigurationError(
            f"{flag} {folder} contains no weights (*.safetensors or *.bin). Download the complete "
            f"model.{hint}",
            field=flag,
        )
