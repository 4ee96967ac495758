"""Why a collective does not complete: one rank asks all, decides, and sends each the verdict."""
