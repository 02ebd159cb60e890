//! Tables and text of rows in Markdown.

/// A Markdown table.
pub fn table<N: AsRef<str>>(header: &[N], lines: impl IntoIterator<Item = Vec<String>>) -> String {
    let line = |cells: Vec<String>| format!("| {} |\n", cells.join(" | "));
    let header: Vec<String> = header.iter().map(|name| name.as_ref().to_owned()).collect();
    let rule = vec!["---".to_owned(); header.len()];
    let lines = [header, rule].into_iter().chain(lines);
    lines.map(|cells| line(cells.into_iter().map(|cell| cell.replace('|', "\\|")).collect())).collect()
}

/// A table of `cell`s by line and column. Each line begins with the cells of the columns `first`.
pub fn pivot<L, C>(
    first: &[&str],
    columns: &[(String, C)],
    lines: impl IntoIterator<Item = (Vec<String>, L)>,
    cell: impl Fn(&L, &C) -> Option<String>,
) -> String {
    let header: Vec<&str> = first.iter().copied().chain(columns.iter().map(|column| column.0.as_str())).collect();
    let lines = lines.into_iter().map(|(mut cells, line)| {
        cells.extend(columns.iter().map(|(_, column)| cell(&line, column).unwrap_or_else(|| "-".to_owned())));
        cells
    });
    table(&header, lines)
}

/// Text of rows for a paragraph or a picture's description: on one line, with markup escaped.
pub fn inline(text: &str) -> String {
    plain(text).replace('|', "\\|")
}

/// [`inline`] for a cell of a [`table`], which escapes bars itself.
pub fn plain(text: &str) -> String {
    let line = text.split_whitespace().collect::<Vec<_>>().join(" ");
    line.replace('\\', "\\\\").replace('<', "&lt;").replace('[', "\\[").replace(']', "\\]")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_of_rows_cannot_be_markup() {
        assert_eq!(inline("a\n  b <!-- | [c]"), "a b &lt;!-- \\| \\[c\\]");
    }
}
