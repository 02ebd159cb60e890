//! Each selector against a plain re-implementation, and what holds for all of them.

mod plain;
mod sliding_window;
