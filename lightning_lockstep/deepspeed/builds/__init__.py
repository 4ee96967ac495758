"""Operations that DeepSpeed compiles when they are first used: one rank of a node builds, the others wait."""
