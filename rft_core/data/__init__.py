"""From rows of raw data to prompts and examples: fields, checks, cleaning, templates, tokens, masks, order."""
