"""Every instruction set that the native kernels can use here."""

from __future__ import annotations

from engine.ops import native

ISAS = [name for name in (native.EMULATED, *native.ISAS) if native.select_isa(name)]  # the best comes last
