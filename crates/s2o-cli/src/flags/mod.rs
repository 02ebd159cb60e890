//! What the command lines of the examples share: flags, loading with a progress bar, and the look of the output.

pub mod exit;
pub mod layout;
pub mod machine;
pub mod model_flags;
pub mod progress;
pub mod prompt_flags;
pub mod s2o_flags;
pub mod tensor_flags;
