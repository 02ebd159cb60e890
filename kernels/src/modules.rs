//! The compiled code, embedded by the build script.

use crate::arch::Arch;

/// The code of one source file.
#[derive(Debug, Clone, Copy)]
pub struct Module {
    /// Stem of the file name.
    pub name: &'static str,
    /// Names of the kernels in the module.
    pub kernels: &'static [&'static str],
    /// The code to load.
    pub code: Code,
}

/// Code in a form that the driver loads.
#[derive(Debug, Clone, Copy)]
pub enum Code {
    /// Machine code of one architecture.
    Cubin(&'static [u8]),
    /// PTX, which the driver compiles at load time.
    Ptx(&'static str),
}

/// All modules of a build.
pub fn modules(arch: Arch) -> &'static [Module] {
    match arch {
        Arch::Sm80 => SM80,
        Arch::Sm90a => SM90A,
    }
}

include!(concat!(env!("OUT_DIR"), "/modules.rs"));

#[cfg(test)]
mod tests {
    use super::*;
    use crate::function::{Dtype, Function, Kernel};

    #[test]
    fn builds_have_their_kernels() {
        for arch in [Arch::Sm80, Arch::Sm90a] {
            let compiled = |kernel: &Kernel| {
                kernel.is_in(arch) && (cfg!(feature = "ladder") || !kernel.name().starts_with("ladder"))
            };
            for &kernel in Kernel::ALL.iter().filter(|kernel| compiled(kernel)) {
                let plain = [Dtype::Bf16, Dtype::F16]
                    .into_iter()
                    .flat_map(|dtype| kernel.head_dims().iter().map(move |&dim| Function::new(kernel, dtype, dim)));
                let capped = plain.clone().filter(|_| kernel.has_capped());
                for function in plain.chain(capped.map(|function| Function { capped: true, ..function })) {
                    let name = function.or_fallback(arch).to_string();
                    let holders: Vec<&Module> =
                        modules(arch).iter().filter(|module| module.kernels.contains(&name.as_str())).collect();
                    assert_eq!(holders.len(), 1, "{name} in {arch}");
                    let code = match holders[0].code {
                        Code::Cubin(code) => code,
                        Code::Ptx(text) => text.as_bytes(),
                    };
                    let symbol = format!("{name}_launch");
                    assert!(code.windows(symbol.len()).any(|bytes| bytes == symbol.as_bytes()), "{symbol} in {arch}");
                }
            }
        }
    }
}
