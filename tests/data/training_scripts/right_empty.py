"""Empty."""


