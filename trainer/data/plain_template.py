"""The chat template of tokenizers that have none. No imports: a deployment needs it on the controller."""

# It needs no special tokens and marks the answer for the loss.
PLAIN_TEMPLATE = (
    "{% for m in messages %}"
    "{% if m['role'] == 'assistant' %}### Response:\n{% generation %}{{ m['content'] }}{{ eos_token }}{% endgeneration %}{{ '\\n' }}"
    "{% elif m['role'] == 'system' %}{{ m['content'] }}\n\n"
    "{% else %}### Instruction:\n{{ m['content'] }}\n\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}### Response:\n{% endif %}"
)
