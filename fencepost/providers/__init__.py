"""Model providers: one wire adapter per protocol, what their failures mean, the catalogue, and a scripted provider."""
