"""SGLang's own API: `/generate`."""
