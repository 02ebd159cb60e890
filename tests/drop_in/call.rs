//! One call of candle-flash-attn's interface, which both crates can compute.

use candle_core::{Result, Tensor};

/// The eleven functions, and the op.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Function {
    FlashAttn,
    Windowed,
    Alibi,
    AlibiWindowed,
    AlibiWindowedSoftcap,
    Op,
    Varlen,
    VarlenWindowed,
    VarlenPagedWindowed,
    VarlenAlibi,
    VarlenAlibiWindowed,
    VarlenAlibiWindowedSoftcap,
}

/// Cumulative lengths of the sequences, and the longest.
#[derive(Debug, Clone)]
pub struct Lengths {
    pub q: Tensor,
    pub k: Tensor,
    pub max_q: usize,
    pub max_k: usize,
}

/// The places of the tokens of paged keys and values.
#[derive(Debug, Clone)]
pub struct Pages {
    pub table: Tensor,
    pub prefix_ranges: Option<Tensor>,
    pub page_len: usize,
}

/// Tensors and arguments; each function takes those that it supports.
#[derive(Debug, Clone)]
pub struct Call {
    pub function: Function,
    pub q: Tensor,
    pub k: Tensor,
    pub v: Tensor,
    pub scale: f32,
    pub causal: bool,
    pub left: Option<usize>,
    pub right: Option<usize>,
    pub softcap: f32,
    pub slopes: Option<Tensor>,
    pub lengths: Option<Lengths>,
    pub pages: Option<Pages>,
}

impl Call {
    /// A call without window, slopes or cap.
    pub fn new(function: Function, [q, k, v]: [Tensor; 3], scale: f32, causal: bool) -> Self {
        let (left, right, softcap) = (None, causal.then_some(0), 0.0);
        let (slopes, lengths, pages) = (None, None, None);
        Self { function, q, k, v, scale, causal, left, right, softcap, slopes, lengths, pages }
    }

    fn slopes(&self) -> &Tensor {
        self.slopes.as_ref().expect("the case has slopes")
    }
}

macro_rules! implementation {
    ($name:ident, $of:ident) => {
        pub fn $name(call: &Call) -> Result<Tensor> {
            let &Call { ref q, ref k, ref v, scale, causal, left, right, softcap, .. } = call;
            match call.function {
                Function::FlashAttn => return $of::flash_attn(q, k, v, scale, causal),
                Function::Windowed => return $of::flash_attn_windowed(q, k, v, scale, left, right),
                Function::Alibi => return $of::flash_attn_alibi(q, k, v, call.slopes(), scale, causal),
                Function::AlibiWindowed => {
                    return $of::flash_attn_alibi_windowed(q, k, v, call.slopes(), scale, left, right);
                }
                Function::AlibiWindowedSoftcap => {
                    let slopes = call.slopes.as_ref();
                    return $of::flash_attn_alibi_windowed_softcap(q, k, v, slopes, scale, left, right, softcap);
                }
                Function::Op => {
                    let op = $of::FlashAttn {
                        softmax_scale: scale,
                        alibi_slopes: call.slopes.clone(),
                        window_size_left: left,
                        window_size_right: right,
                        softcap: Some(softcap),
                    };
                    return q.apply_op3(k, v, op);
                }
                _ => {}
            }
            let &Lengths { q: ref sq, k: ref sk, max_q, max_k } = call.lengths.as_ref().expect("the case has lengths");
            match call.function {
                Function::Varlen => $of::flash_attn_varlen(q, k, v, sq, sk, max_q, max_k, scale, causal),
                Function::VarlenWindowed => {
                    $of::flash_attn_varlen_windowed(q, k, v, sq, sk, max_q, max_k, scale, left, right)
                }
                Function::VarlenPagedWindowed => {
                    let Pages { table, prefix_ranges, page_len } = call.pages.as_ref().expect("the case has pages");
                    let (ranges, cap) = (prefix_ranges.as_ref(), (softcap > 0.0).then_some(softcap));
                    $of::flash_attn_varlen_paged_windowed(
                        q, k, v, sq, sk, table, ranges, max_q, max_k, scale, left, right, *page_len, cap,
                    )
                }
                Function::VarlenAlibi => {
                    $of::flash_attn_varlen_alibi(q, k, v, call.slopes(), sq, sk, max_q, max_k, scale, causal)
                }
                Function::VarlenAlibiWindowed => {
                    let slopes = call.slopes();
                    $of::flash_attn_varlen_alibi_windowed(q, k, v, slopes, sq, sk, max_q, max_k, scale, left, right)
                }
                _ => {
                    let slopes = call.slopes.as_ref();
                    $of::flash_attn_varlen_alibi_windowed_softcap(
                        q, k, v, slopes, sq, sk, max_q, max_k, scale, left, right, softcap,
                    )
                }
            }
        }
    };
}

implementation!(ours, s2o_flash_attn);
#[cfg(feature = "flash-attn")]
implementation!(original, candle_flash_attn);

/// The call with candle-flash-attn's own kernels, in a build that has them.
pub fn by_original(_call: &Call) -> Option<Result<Tensor>> {
    #[cfg(feature = "flash-attn")]
    return Some(original(_call));
    #[cfg(not(feature = "flash-attn"))]
    None
}
