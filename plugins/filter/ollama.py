"""Filter `ollama_problems`: errors in the variables of the role ollama. The logic is in trainyard/ollama/parameters.py."""

from __future__ import annotations

from typing import Any

from trainyard.ollama.parameters import ollama_problems


class FilterModule:
    """The filter that checks Ollama's settings, by its name in templates."""

    def filters(self) -> dict[str, Any]:
        return {"ollama_problems": ollama_problems}
